"""How fast rows become a token cache, beside `dd`, `cp`, `datasets`, MosaicML MDS and Megatron, on the same bytes.

python benchmarks/convert.py                 60,000 rows (0.6 GB), about two minutes on a free machine
python benchmarks/convert.py --s3            20,000 rows (0.2 GB) from an S3 server that runs here, against local ones
python benchmarks/convert.py --full          902,087 rows (9.4 GB; needs 30 GB of free disk), about twenty minutes

`durable`: the source is not in memory, and the cache is on the disk when it ends (as in every build), against `dd` with
O_DIRECT and fsync. `page cache`: the source is in memory and nothing is flushed, against `cp`. Three interleaved
rounds; ratios are medians of the rounds' ratios. The peers that take minutes are timed on the first 20,000 rows and
scaled by tokens, MDS and Megatron too (install them with `make setup-bench`; Megatron stores ids only). The content
key is not in these times: it reads the source once more, `key_s` says how long, and never again while the file stays.
The last line is JSON; each of its `vs` keys says how many times as fast as that the token cache is.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _rows import FULL_ROWS, MAX_TOKENS, VOCABULARY, arrow_stream, bring_into_memory, drop_from_memory, lengths_of

PEERS = Path(__file__).resolve().parent.parent / ".bench"
PEER_ROWS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000, help="rows to convert")
    parser.add_argument("--full", action="store_true", help=f"{FULL_ROWS:,} rows")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--directory", type=Path, help="where to write (default: var/bench)")
    parser.add_argument("--no-peers", action="store_true", help="only dd and cp")
    parser.add_argument("--convert", choices=["durable", "page-cache"], help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--s3", action="store_true", help="only the line for Arrow rows from S3")
    given = parser.parse_args()
    directory = given.directory or Path(__file__).resolve().parent.parent / "var" / "bench"
    if given.convert:
        durable = given.convert == "durable"
        convert(arrow_stream(directory.parent, 10), directory / "first", durable=durable)  # pays for lazy imports
        print(json.dumps(convert(given.source, directory / "rows", durable=durable)))
        return
    if given.s3:
        from_s3(min(given.rows, PEER_ROWS), given.rounds, directory)
        return
    compare(FULL_ROWS if given.full else given.rows, given.rounds, directory, peers=not given.no_peers)


def convert(source: Path, out: Path, *, durable: bool) -> dict[str, float]:
    """One conversion in a process of its own, so that its memory is its own; everything but the content key."""
    from concurrent.futures import ThreadPoolExecutor

    from cache.build import WRITERS, write_rows
    from cache.config import RowsConfig
    from cache.disk.arrays import ArrayFiles
    from cache.rows.convert import Converter
    from cache.source.find import find_files
    from cache.source.open import open_source

    rows = RowsConfig(source=str(source), max_tokens=MAX_TOKENS, vocabulary=VOCABULARY)
    own = [0.0]
    started = time.perf_counter()
    opened = open_source(find_files(rows), rows)
    with ThreadPoolExecutor(WRITERS) as threads:
        files = ArrayFiles(out, "uint32", submit=threads.submit, direct=durable, durable=durable)
        write_rows(
            opened,
            Converter(opened.layout, rows),
            files,
            VOCABULARY,
            lambda _: own.append(memory_mb("RssAnon")),
        )
        files.close()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "rss_mb": memory_mb("VmHWM"), "own_mb": max(own)}


def compare(num_rows: int, rounds: int, directory: Path, *, peers: bool) -> None:
    source = arrow_stream(directory, num_rows)
    size = source.stat().st_size
    tokens = int(lengths_of(num_rows).sum())
    print(f"{num_rows:,} rows, {tokens:,} tokens, {size / 1e9:.2f} GB in and out; {rounds} rounds", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ("dd", "durable", "cp", "page cache")}
    memory: dict[str, float] = {"rss_mb": 0.0, "own_mb": 0.0}
    for number in range(rounds):
        drop_from_memory(source)
        times["dd"].append(dd(source, directory))
        drop_from_memory(source)
        made = own_conversion(source, directory, "durable")
        times["durable"].append(made["seconds"])
        memory = {name: max(memory[name], made[name]) for name in memory}
        bring_into_memory(source)
        # In turns: which one goes first decides who pays for pages that the last one left dirty.
        pair = [("cp", lambda: cp(source, directory)), ("page cache", lambda: page_cache(source, directory))]
        for name, run in pair if number % 2 == 0 else reversed(pair):
            subprocess.run(["sync"], check=True)
            times[name].append(run())
        shown = "  ".join(f"{name} {last[-1]:.2f} s" for name, last in times.items())
        print(f"  round {number + 1}: {shown}", flush=True)

    result: dict[str, Any] = {
        "durable_vs_dd": ratio(times["dd"], times["durable"]),
        "pagecache_vs_cp": ratio(times["cp"], times["page cache"]),
    }
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    table = [(name, seconds, "measured") for name, seconds in medians.items()]
    if peers:
        for name, key, run in PEER_RUNS:
            seconds, note = run_peer(run, source, directory, tokens)
            table.append((name, seconds, note))
            result[key] = None if seconds is None else round(seconds / medians["page cache"], 1)
    result |= {name: round(value) for name, value in memory.items()}
    result |= {"rows": num_rows, "gb": round(size / 1e9, 2), "key_s": round(key_seconds(source, directory), 2)}
    result |= {f"{name.replace(' ', '_')}_s": round(seconds, 2) for name, seconds in medians.items()}
    print(f"\n{'':34}{'seconds':>10}{'GB/s':>8}   times the page cache's")
    for name, seconds, note in table:
        if seconds is None:
            print(f"{name:34}{'—':>10}{'':8}   {note}")
        else:
            times_as_long = seconds / medians["page cache"]
            print(f"{name:34}{seconds:10.2f}{size / seconds / 1e9:8.2f}   {times_as_long:8.1f}   {note}")
    print(f"resident {result['rss_mb']} MB at most, {result['own_mb']} MB of that its own")
    print(json.dumps(result))


def from_s3(num_rows: int, rounds: int, directory: Path) -> None:
    """Arrow rows of a bucket: fetched once, then asked for their etag and converted, against the same rows here."""
    import os
    import tempfile

    import fsspec
    from moto.server import ThreadedMotoServer

    from cache.config import RowsConfig
    from cache.elsewhere.places import fetched

    source = arrow_stream(directory, num_rows)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    system = fsspec.filesystem("s3")
    system.mkdir("bucket")
    system.put(str(source), f"bucket/{source.name}")
    rows = RowsConfig(source=f"s3://bucket/{source.name}")
    times: dict[str, list[float]] = {"fetch": [], "local": [], "from s3": []}
    with tempfile.TemporaryDirectory(dir=directory) as home:
        times["fetch"].append(timed(lambda: fetched(rows, Path(home))))
        for _ in range(rounds):
            times["local"].append(own_conversion(source, directory, "durable")["seconds"])
            asked = time.perf_counter()
            local = Path(str(fetched(rows, Path(home)).source))
            asked = time.perf_counter() - asked
            times["from s3"].append(asked + own_conversion(local, directory, "durable")["seconds"])
    server.stop()
    size = source.stat().st_size
    fetch = times["fetch"][0]
    print(
        f"{num_rows:,} Arrow rows, {size / 1e9:.2f} GB: fetched once from S3 in {fetch:.2f} s "
        f"({size / fetch / 1e9:.2f} GB/s)"
    )
    medians = {f"{name.replace(' ', '_')}_s": round(statistics.median(found), 3) for name, found in times.items()}
    print(json.dumps({"s3_vs_local": ratio(times["local"], times["from s3"]), **medians, "rows": num_rows}))


def dd(source: Path, directory: Path) -> float:
    target = directory / "copy.dd"
    flags = ["bs=16M", "iflag=direct", "oflag=direct", "conv=fsync", "status=none"]
    seconds = timed(lambda: subprocess.run(["dd", f"if={source}", f"of={target}", *flags], check=True))
    target.unlink()
    return seconds


def cp(source: Path, directory: Path) -> float:
    target = directory / "copy.cp"
    seconds = timed(lambda: subprocess.run(["cp", source, target], check=True))
    target.unlink()
    return seconds


def page_cache(source: Path, directory: Path) -> float:
    return own_conversion(source, directory, "page-cache")["seconds"]


def own_conversion(source: Path, directory: Path, how: str) -> dict[str, float]:
    out = directory / "cache"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--convert", how, "--source", source, "--directory", out]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(out)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def key_seconds(source: Path, directory: Path) -> float:
    """Time of the content hash of a source that is not in memory."""
    from cache.key.file_hashes import hash_file

    drop_from_memory(source)
    shutil.rmtree(directory / "hashes", ignore_errors=True)
    return timed(lambda: hash_file(source, directory / "hashes"))


def ds_map(path: Path, directory: Path) -> None:
    """`datasets` mapped through `torch.tensor`, which is what people try first; written to its own cache file."""
    import datasets
    import torch

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_file(str(path))
    columns = ("input_ids", "loss_mask")
    rows.map(
        lambda row: {name: torch.tensor(row[name]) for name in columns},
        cache_file_name=str(directory / "map.arrow"),
        load_from_cache_file=False,
    )


def per_row(path: Path, directory: Path) -> None:
    """The loop that never ends: a tensor a row, from the data set's own indexing."""
    import datasets
    import torch

    rows = datasets.Dataset.from_file(str(path))
    kept = []
    for index in range(len(rows)):
        row = rows[index]
        kept.append((torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])))


def mds(path: Path, directory: Path) -> None:
    """MosaicML's shard writer, fed numpy views (its fastest way)."""
    # `import streaming` alone also imports its vision parts and torchvision, which nothing here uses.
    package = types.ModuleType("streaming")
    package.__path__ = [str(PEERS / "streaming")]
    sys.modules.setdefault("streaming", package)
    from streaming.base.format.mds.writer import MDSWriter

    columns = {"ids": "ndarray:int32", "mask": "ndarray:int8"}
    with MDSWriter(out=str(directory / "mds"), columns=columns, exist_ok=True) as writer:
        for ids, mask in views(path):
            writer.write({"ids": ids, "mask": mask})


def megatron(path: Path, directory: Path) -> None:
    """Megatron's indexed dataset, fed tensors that share numpy's memory (its fastest way a row); ids only."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    out = directory / "megatron"
    out.mkdir()
    builder = IndexedDatasetBuilder(str(out / "ids.bin"), dtype=np.int32)
    for ids, _ in views(path):
        builder.add_item(torch.from_numpy(ids))
        builder.end_document()
    builder.finalize(str(out / "ids.idx"))


def views(path: Path) -> Any:
    """Each row's ids and mask as numpy views."""
    import pyarrow as pa

    for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
        columns = [batch.column(name) for name in ("input_ids", "loss_mask")]
        values = [column.values.to_numpy(zero_copy_only=True) for column in columns]
        ends = columns[0].offsets.to_numpy()
        for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            yield values[0][start:stop], values[1][start:stop]


PEER_RUNS: tuple[tuple[str, str, Callable[[Path, Path], None]], ...] = (
    ("datasets.map(torch.tensor)", "vs_ds_map", ds_map),
    ("torch.tensor(ds[i]), row by row", "vs_per_row", per_row),
    ("MosaicML MDS", "vs_mds", mds),
    ("Megatron, ids only", "vs_megatron", megatron),
)


def run_peer(run: Callable[[Path, Path], None], source: Path, directory: Path, tokens: int) -> tuple[float | None, str]:
    """Seconds for all tokens, from the peer's time on a part of them; nothing of a peer is flushed to the disk."""
    num_rows = min(PEER_ROWS, int(source.stem.split("-")[1]))
    part = arrow_stream(directory, num_rows)
    few = arrow_stream(directory, 10)
    out = directory / "peer"
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    try:
        for path in (few, part):  # the first run pays for the imports
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            seconds = timed(lambda path=path: run(path, out))
    except ImportError as error:
        return None, f"not installed ({error}): make setup-bench"
    finally:
        shutil.rmtree(out, ignore_errors=True)
    share = int(lengths_of(num_rows).sum()) / tokens
    return seconds / share, "measured" if share == 1 else f"scaled from {num_rows:,} rows in {seconds:.1f} s"


def ratio(theirs: list[float], ours: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 2)


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1e3
    return 0.0


if __name__ == "__main__":
    main()
