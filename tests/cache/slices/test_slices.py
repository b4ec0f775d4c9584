"""What is tokenised again and what is not: by edits, deaths and damage, with slices of four rows."""

import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from letters import OneIdACharacter, conversation, put

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadRow, BadSource, CacheCorrupt
from cache.slices import cut as cuts
from cache.slices import make as making
from cache.slices.pieces import read_pieces


class Counting(OneIdACharacter):
    """Writes the number of rows of each call to a file, for other processes too."""

    def __init__(self, log: Path, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._log, self._before = log, before

    def tokenise(self, *given: Any) -> Any:
        self._before()
        with self._log.open("a") as file:
            file.write(f"{given[0].num_rows}\n")
        return super().tokenise(*given)


@pytest.fixture
def tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Slices of four rows; gives the sizes of the slices that were tokenised since it was last asked."""
    monkeypatch.setattr(cuts, "SLICE_ROWS", 4)
    log = tmp_path / "tokenised"
    monkeypatch.setattr(making, "load_chat", lambda *_: Counting(log))
    seen = 0

    def since() -> list[int]:
        nonlocal seen
        lines = [int(line) for line in log.read_text().split()] if log.exists() else []
        new, seen = lines[seen:], len(lines)
        return new

    return since


def talks(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [conversation(f"q{i}", "yes", domain="ab"[i % 2]) for i in range(first, first + count)]


def cached(home: Path, source: Any, **rows: Any) -> TokenCache:
    source = [str(path) for path in source] if isinstance(source, list) else str(source)
    config = RowsConfig(source=source, **{"vocabulary": 1000, "held_out": 0.3, "max_dropped": 1.0} | rows)
    cache = TokenCache.open(build(config, home=home, tokenizer=None, vocabulary=None))
    cache.verify()
    return cache


def stored(home: Path) -> list[Path]:
    return sorted((home / "tokens/.slices").glob("*/*.arrow"))


def source_of(kind: str, directory: Path, rows: list[dict[str, Any]]) -> Path:
    """Ten rows in a file (or data set) of this kind."""
    table = pa.Table.from_pylist(rows)
    path = directory / f"chat.{kind}"
    if kind == "jsonl":
        put(path, rows)
    elif kind == "blanks":
        path.write_bytes(b"\xef\xbb\xbf" + "\n  \n\n".join(json.dumps(row) for row in rows).encode())
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "group":  # one row group of all rows
        pq.write_table(table, path)
    elif kind in ("file", "stream"):
        with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(path, table.schema) as file:
            file.write_table(table, max_chunksize=3)
    elif kind == "batch":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        Dataset.from_list([*rows, *rows]).select(range(9, -1, -1)).save_to_disk(str(path))
    return path


KINDS = ("jsonl", "blanks", "parquet", "group", "file", "stream", "batch", "mapping")


@pytest.mark.parametrize("kind", KINDS)
def test_slices_give_the_bytes_of_an_uncut_source(
    kind: str, tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(kind, tmp_path, talks(10))
    cut = cached(tmp_path / "cut", source)
    assert sum(tokenised()) == 10
    assert len(stored(tmp_path / "cut")) > 2
    monkeypatch.setattr(cuts, "SLICE_ROWS", 1000)
    whole = cached(tmp_path / "whole", source)
    assert len(stored(tmp_path / "whole")) == 1
    assert cut.manifest.arrays == whole.manifest.arrays
    assert cut.manifest.group_names == whole.manifest.group_names
    assert cut.source_row.tolist() == list(range(10))


@pytest.mark.parametrize("slice_rows", [4, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_row_of_the_file_whatever_slice_it_is_in(
    kind: str, slice_rows: int, tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "SLICE_ROWS", slice_rows)
    rows = [conversation(f"q{i}", "yes" if i == 8 else "no") for i in range(10)]
    source = source_of(kind, tmp_path, rows)
    name = {"jsonl": "line 9", "blanks": "line 25", "mapping": "row 1"}.get(kind, "row 8")
    with pytest.raises(BadRow, match=rf"{name} of .*: token id 121 is not in 0..120"):  # y
        cached(tmp_path / "home", source, vocabulary=121)


def test_killed_in_the_middle_only_the_rest_is_tokenised(
    tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put(tmp_path / "chat.jsonl", talks(18))
    child = os.fork()
    if child == 0:
        count = [0]

        def die() -> None:
            count[0] += 1
            if count[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(making, "load_chat", lambda *_: Counting(tmp_path / "tokenised", die))
        cached(tmp_path / "home", source)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert tokenised() == [4, 4, 4]
    assert len(list((tmp_path / "home/tokens/.slices").rglob("*.tmp-*"))) == 1
    cache = cached(tmp_path / "home", source)
    assert tokenised() == [4, 2]
    assert cache.source_row.tolist() == list(range(18))
    assert list((tmp_path / "home/tokens/.slices").rglob("*.tmp-*")) == []


def test_one_more_file_and_more_lines_cost_what_is_new(tmp_path: Path, tokenised: Any) -> None:
    home = tmp_path / "home"
    first, second = put(tmp_path / "a.jsonl", talks(6)), put(tmp_path / "b.jsonl", talks(5, 100))
    cached(home, [first])
    assert tokenised() == [4, 2]
    cached(home, [first, second])
    assert tokenised() == [4, 1]
    put(second, talks(9, 100))
    cached(home, [second, first])
    assert tokenised() == [4, 1]  # the slice that was not full, and the one behind it


def test_a_changed_file_costs_its_own_slices(tmp_path: Path, tokenised: Any) -> None:
    home = tmp_path / "home"
    for kind in ("jsonl", "parquet"):
        files = [tmp_path / f"{i}.{kind}" for i in range(3)]
        for i, file in enumerate(files):
            rows = talks(3, 10 * i)
            pq.write_table(pa.Table.from_pylist(rows), file) if kind == "parquet" else put(file, rows)
        cached(home, files)
        assert tokenised() == [3, 3, 3]
        changed = talks(3, 500)
        pq.write_table(pa.Table.from_pylist(changed), files[1]) if kind == "parquet" else put(files[1], changed)
        cached(home, files)
        assert tokenised() == [3]


def test_what_comes_after_tokens_tokenises_nothing(
    tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put(tmp_path / "chat.jsonl", talks(10))
    keys = {cached(tmp_path / "home", source).key}
    tokenised()

    def not_needed(*_: Any) -> None:
        raise AssertionError("the tokenizer is loaded for nothing")

    monkeypatch.setattr(making, "load_chat", not_needed)
    for change in ({"max_tokens": 4}, {"overflow": "split", "max_tokens": 4}, {"held_out": 0.5}):
        cache = cached(tmp_path / "home", source, **change)
        keys.add(cache.key)
        assert cache.manifest.tokenizer == {}
    assert len(keys) == 4
    assert tokenised() == []


@pytest.mark.parametrize("change", ["template", "arguments", "supervise", "groups", "column"])
def test_what_decides_tokens_tokenises_everything(change: str, tmp_path: Path, tokenised: Any) -> None:
    source = put(tmp_path / "chat.jsonl", [talk | {"other": talk["messages"]} for talk in talks(10)])
    cached(tmp_path / "home", source)
    tokenised()
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    options: dict[str, dict[str, Any]] = {
        "template": {"template": str(tmp_path / "template.jinja")},
        "arguments": {"template_arguments": {"enable_thinking": False}},
        "supervise": {"supervise": "last"},
        "groups": {"groups": ["a"]},
        "column": {"columns": {"messages": "other"}},
    }
    cached(tmp_path / "home", source, **options[change])
    assert sum(tokenised()) == (5 if change == "groups" else 10)


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_a_damaged_slice_is_made_again_said_aloud_and_no_other(
    harm: str, tmp_path: Path, tokenised: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = put(tmp_path / "chat.jsonl", talks(10))
    good = cached(tmp_path / "home", source, max_tokens=9)
    tokenised()
    slice_ = next(path for path in stored(tmp_path / "home") if next(read_pieces(path)).facts.source_rows == 2)
    content = slice_.read_bytes()
    slice_.unlink()
    if harm != "gone":
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        slice_.write_bytes({"flip": flipped, "cut": content[:-30], "empty": b""}[harm])
    with caplog.at_level(logging.WARNING, "cache"):
        again = cached(tmp_path / "home", source, max_tokens=8)
    assert tokenised() == [2]
    assert again.manifest.arrays == good.manifest.arrays
    assert ("damaged and is made again" in caplog.text) == (harm != "gone")


def test_no_flipped_or_missing_byte_goes_unnoticed(tmp_path: Path, tokenised: Any) -> None:
    cached(tmp_path / "home", put(tmp_path / "chat.jsonl", talks(3)))
    (slice_,) = stored(tmp_path / "home")
    content = slice_.read_bytes()
    for at in range(len(content)):
        for harmed in (content[:at] + bytes([content[at] ^ 0x81]) + content[at + 1 :], content[:at]):
            slice_.unlink()
            slice_.write_bytes(harmed)
            with pytest.raises(CacheCorrupt, match="checksum"):
                list(read_pieces(slice_))


def test_builders_at_once_make_each_slice_once(tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(tmp_path / "chat.jsonl", talks(26))
    log = tmp_path / "tokenised"
    monkeypatch.setattr(making, "load_chat", lambda *_: Counting(log, lambda: time.sleep(0.05)))
    children = []
    for max_tokens in (5, 6, 7):  # three keys, so that none waits for another's token cache
        child = os.fork()
        if child == 0:
            cached(tmp_path / "home", source, max_tokens=max_tokens)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert sorted(tokenised()) == [2, 4, 4, 4, 4, 4, 4]


def test_a_builder_does_not_wait_while_there_is_something_else_to_make(tmp_path: Path, tokenised: Any) -> None:
    source = put(tmp_path / "chat.jsonl", talks(10))
    cached(tmp_path / "home", source)
    tokenised()
    first, second, _ = stored(tmp_path / "home")
    for path in (first, second):
        path.unlink()
    lock = first.parent / ".locks" / first.stem
    child = os.fork()
    if child == 0:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            deadline = time.monotonic() + 20
            while not second.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(0 if second.exists() and not first.exists() else 1)
    while _is_free(lock):
        time.sleep(0.01)
    cached(tmp_path / "home", source, max_tokens=9)
    assert os.waitpid(child, 0)[1] == 0
    assert len(tokenised()) == 2


def _is_free(lock: Path) -> bool:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_file_that_changes_while_it_is_tokenised_leaves_no_slice(
    tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = put(tmp_path / "chat.jsonl", talks(3))

    def change() -> None:
        put(source, talks(3, 7))
        os.utime(source, (1, 1))

    monkeypatch.setattr(making, "load_chat", lambda *_: Counting(tmp_path / "tokenised", change))
    with pytest.raises(BadSource, match="changed while it was read"):
        cached(tmp_path / "home", source)
    assert stored(tmp_path / "home") == []
    assert [path for path in (tmp_path / "home/tokens/.slices").rglob("*") if ".tmp" in path.name] == []


def test_a_slice_that_is_used_is_young_again(tmp_path: Path, tokenised: Any) -> None:
    source = put(tmp_path / "chat.jsonl", talks(3))
    cached(tmp_path / "home", source)
    (slice_,) = stored(tmp_path / "home")
    os.utime(slice_, (1, 1))
    cached(tmp_path / "home", source, max_tokens=9)
    assert time.time() - slice_.stat().st_mtime < 60


def test_a_slice_of_any_size_is_written_in_pieces(
    tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache.slices import collect as tokenise

    monkeypatch.setattr(cuts, "SLICE_ROWS", 10_000)
    source = put(tmp_path / "chat.jsonl", talks(2000))
    whole = cached(tmp_path / "whole", source)
    monkeypatch.setattr(tokenise, "PIECE_TOKENS", 1000)
    cut = cached(tmp_path / "cut", source)
    assert len(list(read_pieces(stored(tmp_path / "cut")[0]))) > 5
    assert cut.manifest.arrays == whole.manifest.arrays


def test_a_row_group_is_cut_into_few_slices(tmp_path: Path, tokenised: Any) -> None:
    source = tmp_path / "chat.parquet"
    pq.write_table(pa.Table.from_pylist(talks(100)), source)
    cache = cached(tmp_path / "home", source)
    assert len(stored(tmp_path / "home")) == cuts.MOST_OF_A_GROUP
    assert cache.source_row.tolist() == list(range(100))


def test_long_lines_and_texts_are_cut_by_their_bytes(
    tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "SLICE_BYTES", 250)
    monkeypatch.setattr(cuts, "SLICE_ROWS", 1000)
    lengths = (10, 500, 10, 12, 501)
    rows = [conversation("q", "y" * length) for length in lengths]
    cache = cached(tmp_path / "home", put(tmp_path / "chat.jsonl", rows), overflow="split")
    assert tokenised() == [1, 2, 1, 1]  # a line that is too long ends with the block that holds its end
    assert np.diff(cache.offsets).tolist() == [length + 1 for length in lengths]


def test_equal_slices_are_made_once(tmp_path: Path, tokenised: Any) -> None:
    source = put(tmp_path / "chat.jsonl", talks(4) * 3)
    cache = cached(tmp_path / "home", source)
    assert tokenised() == [4]
    assert cache.source_row.tolist() == list(range(12))


def test_slices_grow_with_the_source_in_doublings() -> None:
    of = cuts.SliceSize.of
    assert (
        of(0, 1) == of(cuts.SLICE_BYTES * cuts.MOST_SLICES, None) == cuts.SliceSize(cuts.SLICE_BYTES, cuts.SLICE_ROWS)
    )
    assert of(cuts.SLICE_BYTES * cuts.MOST_SLICES + 1, 0) == cuts.SliceSize(2 * cuts.SLICE_BYTES, 2 * cuts.SLICE_ROWS)
    for size in (10**9, 10**11, 10**12, 10**13):
        assert size / 1000 / of(size, size // 1000).rows <= cuts.MOST_SLICES
        assert size / of(size, size // 1000).size_bytes <= cuts.MOST_SLICES


def test_a_source_of_any_size_has_few_slices(tmp_path: Path, tokenised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks(64)))
    many = cached(tmp_path / "many", path)
    assert tokenised() == [4] * 16
    monkeypatch.setattr(cuts, "SLICE_BYTES", 1 << 9)
    monkeypatch.setattr(cuts, "MOST_SLICES", 4)
    few = cached(tmp_path / "few", path)
    assert len(tokenised()) <= 4
    assert few.ids.tolist() == many.ids.tolist()
