"""Processes that build, read and delete in one home at random: nothing is half, nothing in use is lost.

python tests/cache/test_at_once.py 60     # a minute of it, with counts
"""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SEED = 20261201


def work(home: Path, source: Path, seed: int, seconds: float) -> Counter[str]:
    """Builds one of four caches, reads one for a while as a training does, or deletes, until the time is over."""
    from cache.build import build
    from cache.config import RowsConfig
    from cache.disk.removal import drop_slices, entries, remove
    from cache.disk.store import TokenCache
    from cache.errors import CacheIncomplete, CacheInUse, CacheMismatch

    chosen, done, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        rows = RowsConfig(source=str(source), vocabulary=1000, max_tokens=8 + chosen.randrange(4), held_out=0.0)
        what = chosen.choice(("build", "train", "train", "delete", "delete"))
        if what == "build":
            build(rows, home=home, tokenizer=None, vocabulary=None)
        elif what == "train":
            try:
                cache = TokenCache.open(build(rows, home=home, tokenizer=None, vocabulary=None))
            except CacheIncomplete:
                done["taken away before it was opened"] += 1
                continue
            for _ in range(3):  # whatever is deleted meanwhile, what is open is there, whole, under its name
                cache.verify()
                assert int(cache.ids.sum(dtype="int64")) > 0
                assert (cache.path / "zarr.json").exists()
                time.sleep(chosen.random() / 100)
            del cache
        else:
            found = list((home / "tokens").glob("[!.]*"))
            try:
                if found:
                    remove(chosen.choice(found), home)
                    done["removed"] += 1
            except CacheInUse:
                done["kept, in use"] += 1
            except FileNotFoundError:
                done["gone before it was removed"] += 1
            except CacheMismatch as error:
                if "not a directory" not in str(error):
                    raise
                done["gone before it was removed"] += 1
            drop_slices(home)
            entries(home)
        done[what] += 1
    return done


def at_once(directory: Path, seconds: float, processes: int = 2) -> Counter[str]:
    source, home = directory / "rows.jsonl", directory / "home"
    rows = [{"input_ids": [i % 990, *range(1, 3 + i % 12)], "loss_mask": [1] * (3 + i % 12)} for i in range(300)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "tokens").mkdir(parents=True)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(home), str(source), str(SEED + number), str(seconds)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for number in range(processes)
    ]  # fmt: skip
    counts = Counter[str]()
    for one in started:
        out, err = one.communicate(timeout=seconds + 60)
        assert one.returncode == 0, err
        counts += Counter(json.loads(out))
    from cache.disk.store import TokenCache

    left = sorted((home / "tokens").glob("[!.]*"))
    assert not [path for path in left if ".tmp-" in path.name], "nothing half is left"
    for path in left:
        TokenCache.open(path).verify()
    return counts


def test_nothing_is_half_and_nothing_in_use_is_lost(tmp_path: Path) -> None:
    counts = at_once(tmp_path, seconds=4.0)
    assert min(counts["build"], counts["train"], counts["removed"]) > 0, counts


if __name__ == "__main__":
    if len(sys.argv) == 5:
        print(json.dumps(work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            print(SEED, dict(at_once(Path(directory), float(sys.argv[1]))))
