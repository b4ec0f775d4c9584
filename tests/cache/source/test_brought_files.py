"""Files as people have them: each is read whole, or named with what is wrong with it."""

import gzip
import json
import logging
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_rows import rows_of, table

from cache.config import RowsConfig
from cache.errors import BadRow, BadSource

ROWS = [[1, 2, 3], [4, 5]]


def lines(rows: list[list[int]] = ROWS) -> str:
    return "".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) + "\n" for row in rows)


def put(path: Path, rows: list[list[int]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines(rows))
    return path


def test_all_files_of_a_directory_are_read_or_named(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    put(source / "a.jsonl")
    (source / "b.json.gz").write_bytes(gzip.compress(lines().encode()))
    (source / "c").write_bytes(pa.Codec("zstd").compress(lines().encode(), asbytes=True))
    put(source / "deep/er/d.ndjson")
    put(source / ".hidden/e.jsonl")
    for name, content in (
        ("README.md", "[a link]"),
        ("photo.png", "\x89PNG"),
        ("dataset_infos.json", "{}"),
        ("none.jsonl", ""),
    ):
        (source / name).write_text(content)
    (source / "back").symlink_to(source)
    with caplog.at_level(logging.WARNING):
        cache = make(source)
    assert rows_of(cache) == ROWS * 4
    assert (cache.manifest.files, cache.manifest.files_left_out) == (4, 4)
    assert "4 files are read, 4 left out" in caplog.text
    for told in ("README.md (no data by its name)", "photo.png (of no known format)", "dataset_infos.json (describes"):
        assert told in caplog.text
    assert rows_of(make(source / "**/*.ndjson")) == ROWS  # a link that points back gives no row twice


def test_splits_are_whole_names(make: Any, tmp_path: Path) -> None:
    for i, name in enumerate(("train_sft", "train_gen", "test_sft", "test_gen")):
        put(tmp_path / f"repo/data/{name}-00000-of-00001-0123abcd.jsonl", [[i, 9]])
    assert rows_of(make(tmp_path / "repo", split="train_sft")) == [[0, 9]]
    for split in (None, "train"):
        with pytest.raises(BadSource, match="splits test_gen, test_sft, train_gen, train_sft"):
            make(tmp_path / "repo", split=split)
    for name in ("train_1", "train-2"):
        put(tmp_path / f"parts/{name}.jsonl")
    assert rows_of(make(tmp_path / "parts", split="train")) == ROWS * 2
    put(tmp_path / "folders/train/x.jsonl")
    put(tmp_path / "folders/test/x.jsonl", [[7, 7]])
    assert rows_of(make(tmp_path / "folders", split="test")) == [[7, 7]]


def test_what_is_missing_is_named(make: Any, tmp_path: Path) -> None:
    for number in (0, 2):
        put(tmp_path / f"shards/train-{number:05d}-of-00003.jsonl")
    for source in (tmp_path / "shards", tmp_path / "shards/*.jsonl"):
        with pytest.raises(BadSource, match=r"1 of 3 numbered files are missing in .*: train-00001-of-00003\.jsonl"):
            make(source)
    blob = put(tmp_path / "hub/blobs/aaaa")
    data = tmp_path / "hub/snapshots/0f0f/data"
    data.mkdir(parents=True)
    (data / "train-00000-of-00002.jsonl").symlink_to(blob)
    (data / "train-00001-of-00002.jsonl").symlink_to(tmp_path / "hub/blobs/bbbb")
    for source in (tmp_path / "hub", tmp_path / "hub/snapshots/0f0f"):
        with pytest.raises(BadSource, match=r"train-00001-of-00002.jsonl: a link to .*bbbb, which is not there"):
            make(source)
    put(tmp_path / "hub/blobs/bbbb", [[8, 8]])
    assert rows_of(make(tmp_path / "hub")) == [*ROWS, [8, 8]]
    put(tmp_path / "loading/a.jsonl.incomplete")
    with pytest.raises(BadSource, match="an unfinished download"):
        make(tmp_path / "loading")


def test_a_file_that_two_entries_name_is_refused(make: Any, tmp_path: Path) -> None:
    path = put(tmp_path / "s/a.jsonl")
    (tmp_path / "s/b.jsonl").symlink_to(path)
    with pytest.raises(BadSource, match=r"a.jsonl is named twice, by '.*a.jsonl' and by '.*\*'"):
        make([str(path), str(tmp_path / "s/a*")])
    assert rows_of(make(tmp_path / "s/*.jsonl")) == ROWS


def test_brackets_and_blanks_in_names(make: Any, tmp_path: Path) -> None:
    put(tmp_path / "[v2] chat/a.jsonl")
    put(tmp_path / "[v2] chat/b #2.jsonl", [[6, 6]])
    assert rows_of(make(tmp_path / "[v2] chat/*.jsonl")) == [*ROWS, [6, 6]]
    assert rows_of(make(tmp_path / "[v2] chat/b #2.jsonl")) == [[6, 6]]


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_damaged_compressed_files_are_named(make: Any, tmp_path: Path, codec: str) -> None:
    whole = pa.Codec(codec).compress(lines([[i % 900, i % 700] for i in range(5000)]).encode(), asbytes=True)
    flipped = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    path = tmp_path / "rows.jsonl.z"
    for harmed in [whole[: len(whole) // 2], whole[:-3], *([flipped] if codec == "gzip" else [])]:
        path.write_bytes(harmed)
        with pytest.raises(BadSource, match=r"rows\.jsonl\.z: cannot be read to its end"):
            make(path)


def test_zstd_frames_and_frames_to_skip(make: Any, tmp_path: Path) -> None:
    frames = [pa.Codec("zstd").compress(lines([row]).encode(), asbytes=True) for row in ROWS]
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0skip"
    for order in (frames, [skipped, *frames], [frames[0], skipped, frames[1]]):
        (tmp_path / "rows.zst").write_bytes(b"".join(order))
        assert rows_of(make(tmp_path / "rows.zst")) == ROWS


def test_an_arrow_stream_that_was_cut_at_a_batch_is_named(make: Any, tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    data = table([[1, 2]] * 9)
    with pa.ipc.new_stream(sink, data.schema) as stream:
        stream.write_table(data, max_chunksize=3)
    whole = sink.getvalue().to_pybytes()
    (tmp_path / "rows.arrows").write_bytes(whole[:-8])
    with pytest.raises(BadSource, match=r"rows\.arrows: an Arrow stream without its end mark"):
        make(tmp_path / "rows.arrows")
    (tmp_path / "rows.arrows").write_bytes(whole)
    assert len(rows_of(make(tmp_path / "rows.arrows"))) == 9


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (lines().encode("utf-16"), BadSource, r"UTF-16 text, expected UTF-8: iconv"),
        (lines().encode("utf-16-le"), BadSource, r"UTF-16 text"),
        (b'[{"input_ids": [1, 2], "loss_mask": [1, 1]},\n', BadRow, r"row 1 of .*the array has no end"),
        (b'[{"input_ids": [1, 2], "loss_mask": [1, 1]},\n{"input_ids": [1', BadRow, r"row 1 of .*not JSON"),
        (b'[{"input_ids": [1, 2]} {"input_ids": [1, 2]}]', BadRow, r"row 1 of .*expected a comma before it"),
        (b'[{"input_ids": [1, 2]}] [', BadRow, r"behind its array.*jq -c"),
        (b'[[{"role": "user"}]]', BadSource, r"row 0 of .*expected an object.*jq -c '\.\[\]'"),
        (b'[{"role": "user", "content": "a"}]', BadSource, r"messages without their conversation: jq -c"),
        (b'[{"input_ids": [1, 2x]}]', BadRow, r"row 0 of .*not JSON \(Expecting ',' delimiter, '.*2x\]"),
        (b'[{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": 5}]', BadRow, r"row 1 of .*column input_ids: 5"),
        (b"[]", BadSource, r"no row in it"),
        (b'{\n"data": [\n{}]}', BadSource, r"If the rows are in data: jq -c"),
        (b'{"data": [{"messages": []}]}', BadSource, r"If the rows are in data: jq -c '\.\[\"data\"\]\[\]'"),
        (b'{"rows": 6, "by": "someone"}', BadSource, r"rows\.jsonl: neither token ids .* name the data files"),
        (b'{"input_ids": ' + b"[" * 100_000, BadRow, r"line 1 of .*not JSON"),
    ],
)
def test_other_json_is_named_with_what_to_do(
    make: Any, tmp_path: Path, content: bytes, error: type[Exception], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(error, match=message):
        make(tmp_path / "rows.jsonl")


def test_a_line_of_any_length_costs_bounded_memory(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.source import lines as reading

    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "rows.jsonl").write_text(lines() + '{"input_ids": [' + "1," * (1 << 22) + "1]}\n")
    with pytest.raises(BadSource, match=r"line 3 of .*longer than 1 MiB"):
        make(tmp_path / "rows.jsonl")


def test_days_of_a_template_may_be_dates_and_must_be_days() -> None:
    arguments: Callable[[Any], Any] = lambda day: RowsConfig(source="x", template_arguments={"strftime_now": day})  # noqa: E731
    assert arguments(date(2025, 1, 31)) == arguments("2025-01-31")
    for day in ("today", 20250131, None):
        with pytest.raises(ValueError, match=r"strftime_now is .*, expected a day such as 2025-01-31"):
            arguments(day)


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("is_array", [True, False])
def test_arrays_and_objects_over_lines_are_read(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None, is_array: bool
) -> None:
    """In blocks of any size, with text in them that looks like JSON, and outside ASCII."""
    from cache.source import lines as reading

    found = [{"input_ids": row, "loss_mask": [1] * len(row), "note": 'a]}",\n{[é😀\\'} for row in ROWS * 20]
    texts = [json.dumps(one, indent=indent, ensure_ascii=len(one["input_ids"]) > 2) for one in found]
    text = f"[{', '.join(texts)}\n]\n" if is_array else "\n".join(texts) if indent else "{\n" + "\n".join(texts)[1:]
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    plain = list(reading.read_rows(reading.DataFile(path, "json"), block))
    assert [json.loads(one) for part in plain for one in part.text.splitlines()] == found
    assert plain[-1].first + plain[-1].count == len(found)
    assert rows_of(make(path)) == ROWS * 20
    (tmp_path / "rows.json.gz").write_bytes(pa.Codec("gzip").compress(path.read_bytes(), asbytes=True))
    assert rows_of(make(tmp_path / "rows.json.gz")) == ROWS * 20


def test_a_long_value_of_an_array_costs_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.source import lines as reading

    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, {"input_ids": [' + "1," * (1 << 22) + "1]}]")
    with pytest.raises(BadSource, match=r"row 1 of .*longer than 1 MiB"):
        list(reading.read_rows(reading.DataFile(path, "json"), 1 << 16))
