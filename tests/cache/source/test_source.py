"""Every accepted input gives the same rows, and what is not accepted is refused by name."""

import gzip
import json
import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from arrow_rows import masks_of, rows_of, table

from cache.errors import BadRow, BadSource

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11]]
MASKS = [[0, 1, 1], [1, 1], [1, 1, 0, 1], [1, 1]]
DATA = table(ROWS, MASKS)


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


JSON_ROWS = [{"input_ids": row, "loss_mask": mask} for row, mask in zip(ROWS, MASKS, strict=True)]


def put(directory: Path, form: str) -> Path:
    path = directory / f"rows.{form}"
    if form == "parquet":
        pa.parquet.write_table(DATA, path)
    elif form in ("stream", "file"):
        with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, DATA.schema) as writer:
            writer.write_table(DATA, max_chunksize=1)
    elif form == "jsonl":
        path.write_text(lines(JSON_ROWS))
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(JSON_ROWS).encode()))
    elif form == "saved":
        datasets.Dataset(DATA).save_to_disk(path, num_shards=2)
    elif form == "saved dict":
        datasets.DatasetDict({"train": datasets.Dataset(DATA)}).save_to_disk(path)
    return path


FORMS = ["parquet", "stream", "file", "jsonl", "jsonl.gz", "saved", "saved dict"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_rows(make: Any, tmp_path: Path, form: str) -> None:
    cache = make(put(tmp_path, form))
    assert rows_of(cache) == ROWS
    assert masks_of(cache) == MASKS
    assert cache.source_row.tolist() == [0, 1, 2, 3]


def test_a_list_of_paths_and_a_glob_count_rows_on(make: Any, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines(JSON_ROWS))
    listed = make([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")])
    globbed = make(tmp_path / "*.jsonl")
    plain = make(tmp_path)
    for cache in (listed, globbed, plain):
        assert rows_of(cache) == ROWS * 2
        assert cache.source_row.tolist() == list(range(8))


def test_load_dataset_cache_is_read_by_its_metadata(make: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines(JSON_ROWS))
    loaded = datasets.load_dataset(
        "json", data_files={"train": str(tmp_path / "in.jsonl")}, cache_dir=str(tmp_path / "hub")
    )["train"]
    directory = Path(loaded.cache_files[0]["filename"]).parent
    loaded.map(lambda row: {"input_ids": row["input_ids"][::-1]})  # leaves a cache-*.arrow beside the data
    assert len(list(directory.glob("*.arrow"))) == 2
    assert rows_of(make(directory)) == ROWS


def test_map_leftovers_in_a_saved_directory_are_not_rows(make: Any, tmp_path: Path) -> None:
    path = put(tmp_path, "saved")
    datasets.load_from_disk(path).map(lambda row: {"input_ids": row["input_ids"][::-1]})
    assert len(list(path.glob("*.arrow"))) > 2
    assert rows_of(make(path)) == ROWS


def test_several_splits_need_one_named(make: Any, tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=datasets.Dataset(DATA), test=datasets.Dataset(DATA.slice(0, 1)))
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(BadSource, match=r"rows\.split: not set, but .* has the splits train, test"):
        make(tmp_path / "both")
    assert rows_of(make(tmp_path / "both", split="test")) == ROWS[:1]
    with pytest.raises(BadSource, match=r"rows\.split: 'valid'"):
        make(tmp_path / "both", split="valid")


def test_plain_directories_have_splits_by_name(make: Any, tmp_path: Path) -> None:
    data = tmp_path / "repo" / "data"
    data.mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pa.parquet.write_table(DATA, data / f"{name}.parquet")
    with pytest.raises(BadSource, match=r"splits test, train"):
        make(tmp_path / "repo")
    assert rows_of(make(tmp_path / "repo", split="train")) == ROWS * 2


@pytest.mark.parametrize("change", ["select", "range", "shuffle", "filter", "shuffle twice"])
def test_rows_are_those_that_the_dataset_shows(make: Any, change: str) -> None:
    many = [[i, i + 1, i + 2] for i in range(200)]
    chunks = [table(many[start : start + 7]) for start in range(0, 200, 7)]
    data = datasets.Dataset(pa.concat_tables(chunks))
    changed = {
        "select": lambda: data.select([5, 3, 3, 199, 0]),
        "range": lambda: data.select(range(50, 80)),
        "shuffle": lambda: data.shuffle(seed=3),
        "filter": lambda: data.filter(lambda row: row["input_ids"][0] % 3 == 0),
        "shuffle twice": lambda: data.shuffle(seed=3).select(range(10, 60)).shuffle(seed=4),
    }[change]()
    cache = make(data=changed)
    assert rows_of(cache) == changed["input_ids"][:]
    assert cache.source_row.tolist() == list(range(len(changed)))


def test_a_composed_mapping_copies_a_chunk_at_a_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.source import chunks as source

    monkeypatch.setattr(source, "TAKE_BYTES", 1 << 10)
    taken: list[int] = []
    take = source._take
    monkeypatch.setattr(source, "_take", lambda *given: taken.append(given[2].size) or take(*given))
    many = datasets.Dataset(table([[i % 900] * 30 for i in range(300)])).shuffle(seed=1)
    assert rows_of(make(data=many)) == many["input_ids"][:]
    assert max(taken) < 20
    assert sum(taken) == 2 * 300  # once for the key, once for the cache


def test_a_slice_keeps_its_own_values_only(make: Any) -> None:
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int32())):
        ids = pa.array([[11], [21, 22], [31, 32, 33]], kind).slice(1)
        cache = make(data=pa.table({"input_ids": ids}), supervise_all=True)
        assert cache.ids.tolist() == [21, 22, 31, 32, 33]
        assert cache.lengths.tolist() == [2, 3]
        assert cache.offsets.tolist() == [0, 2, 5]
    fixed = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)).slice(1)
    assert make(data=pa.table({"input_ids": fixed}), supervise_all=True).ids.tolist() == [3, 4, 5, 6]


def test_a_row_number_past_32_bits_is_found_by_position() -> None:
    from cache.source.chunks import _edges
    from cache.source.list_columns import spans_of_list
    from cache.source.place import Place

    # Offsets only: three rows of 2³⁰ tokens, more than 32 bits hold. Values are never touched.
    offsets = pa.py_buffer(np.array([0, 2**30, 2**31, 3 * 2**30], dtype=np.int64))
    huge = pa.Array.from_buffers(pa.int8(), 3 * 2**30, [None, pa.py_buffer(mmap.mmap(-1, 3 * 2**30))])
    column = pa.Array.from_buffers(pa.large_list(pa.int8()), 3, [None, offsets], children=[huge])
    assert _edges(column) == [0, 1, 2, 3]
    spans, valid = spans_of_list(column.slice(2), "ids", Place("rows", 2))
    assert (spans.length.tolist(), valid.tolist(), spans.values.size) == ([2**30], [True], 2**30)


def test_a_row_of_a_million_tokens_beside_small_ones(make: Any) -> None:
    long = np.arange(1_000_000) % 1000
    ids = pa.array([[1, 2], long, [3, 4]], pa.large_list(pa.int32()))
    cache = make(data=pa.table({"input_ids": ids}), supervise_all=True, max_tokens=2_000_000)
    assert cache.lengths.tolist() == [2, 1_000_000, 2]
    assert (cache.ids[2:-2] == long).all()


def test_chunks_are_small_whatever_the_batches_are(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.source import chunks as source

    monkeypatch.setattr(source, "CHUNK_TOKENS", 5)
    assert rows_of(make(data=DATA)) == ROWS
    lengths = [3, 2, 40, 1, 1, 1, 1, 0, 5, 2]
    edges = source._edges(pa.array([[0] * length for length in lengths]))
    chunks = [lengths[start:stop] for start, stop in pairwise(edges)]
    assert [length for chunk in chunks for length in chunk] == lengths
    assert all(sum(chunk) <= 5 or len(chunk) == 1 for chunk in chunks)
    assert len(chunks) < len(lengths)


def test_a_value_of_another_type_is_named_with_its_line(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for odd in ('{"input_ids": "text", "loss_mask": [1]}', '{"input_ids": [1, 2.5], "loss_mask": [1, 1]}'):
        path.write_text(lines(JSON_ROWS[:2]) + odd + "\n" + lines(JSON_ROWS[2:]))
        with pytest.raises(BadRow, match=r"line 3 of .*rows\.jsonl, column input_ids"):
            make(path)
    path.write_text(lines(JSON_ROWS[:1]) + "{not json\n")
    with pytest.raises(BadRow, match=r"line 2 of .*not JSON"):
        make(path)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_no_rows(make: Any, tmp_path: Path, ending: str) -> None:
    good = [json.dumps(row) for row in JSON_ROWS[:2]]
    path = tmp_path / "rows.jsonl"
    for layout in ([good[0], "", "   ", good[1]], ["", good[0], "\t", good[1], "", ""], [good[0], good[1]]):
        path.write_bytes(ending.join(layout).encode())
        assert rows_of(make(path)) == ROWS[:2]


def test_lines_count_blank_ones_in_an_error(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(JSON_ROWS[:1]) + "\n\n" + json.dumps({"input_ids": [1, 5000], "loss_mask": [1, 1]}) + "\n")
    with pytest.raises(BadRow, match=r"line 4 of .*token id 5000"):
        make(path)


@pytest.mark.parametrize("form", ["stream", "file", "parquet", "table"])
def test_an_error_names_the_row_of_its_file_whatever_the_batches_are(make: Any, tmp_path: Path, form: str) -> None:
    wrong = table([*ROWS, [1, 5000]])
    path = tmp_path / "rows.data"
    if form == "parquet":
        pa.parquet.write_table(wrong, path, row_group_size=2)
    elif form != "table":
        with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, wrong.schema) as writer:
            writer.write_table(wrong, max_chunksize=2)
    cut = pa.concat_tables([wrong.slice(0, 2), wrong.slice(2)]) if form == "table" else None
    with pytest.raises(BadRow, match=r"row 4 of .*token id 5000"):
        make(path, data=cut)


def test_half_a_surrogate_pair_beside_the_rows_harms_nobody(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    odd = json.dumps(JSON_ROWS[1])[:-1] + ', "text": "\\ud83d x"}\n'
    path.write_text(lines(JSON_ROWS[:1]) + odd + lines(JSON_ROWS[2:]))
    assert rows_of(make(path)) == ROWS


def test_conversations_keep_their_text(tmp_path: Path) -> None:
    from cache.source.columns import Layout
    from cache.source.jsonl import conversation_batch
    from cache.source.lines import read_lines
    from cache.source.place import Place

    path = tmp_path / "chat.jsonl"
    calls = [[{"role": "assistant", "arguments": {"a": 1}}], [{"role": "assistant", "arguments": {"b": "x"}}]]
    path.write_text(
        '{"messages": [{"role": "user", "content": "\\ud83d x"}]}\n'
        '{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}\n'
        + "".join(json.dumps({"messages": call}) + "\n" for call in calls)
    )
    (block,) = read_lines(path)
    batch = conversation_batch(block, Layout("conversations", messages="messages"), Place(str(path), 0, lines=True))
    messages = [json.loads(text) for text in batch.column("messages").to_pylist()]
    assert messages[0][0]["content"] == "� x"
    assert messages[1][0]["content"] == "\U0001f600"
    assert messages[2:] == calls


def test_conversations_may_differ_in_type_from_line_to_line(tmp_path: Path) -> None:
    from cache.source.columns import Layout
    from cache.source.jsonl import conversation_batch
    from cache.source.lines import read_lines
    from cache.source.place import Place

    contents: list[Any] = ["q", [{"type": "text", "text": "q"}], None]
    path = tmp_path / "chat.jsonl"
    path.write_text(lines([{"messages": [{"role": "user", "content": content}]} for content in contents]))
    (block,) = read_lines(path)
    batch = conversation_batch(block, Layout("conversations", messages="messages"), Place(str(path), 0, lines=True))
    assert [json.loads(text)[0]["content"] for text in batch.column("messages").to_pylist()] == contents


def test_a_line_longer_than_a_block(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache.source import chunks

    rows = [list(range(i, i + 50)) for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{"input_ids": row, "loss_mask": [1] * 50} for row in rows]))
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 64)
    assert rows_of(make(path)) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.bin", b"\x00\x01\x02", "expected an Arrow file or stream, Parquet, or JSON: an object a line"),
        ("rows.arrow", b"\xff\xff\xff\xff\x10", "an Arrow stream without its end mark"),
        ("rows.parquet", b"PAR1 and nothing", "not a readable parquet"),
        ("rows.jsonl", b'{"text": "x"}\n', "neither token ids .* nor conversations"),
        ("rows.jsonl", b"", "no row in it"),
        ("rows.jsonl", b"[1, 2]\n", "row 0 of .*expected an object"),
    ],
)
def test_what_is_no_source_is_refused(make: Any, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadSource, match=message):
        make(tmp_path / name)


def test_other_refusals(make: Any, tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="nothing at"):
        make(tmp_path / "nowhere*.jsonl")
    with pytest.raises(BadSource, match="no data files in it"):
        make(tmp_path)
    with pytest.raises(BadSource, match=r"rows\.columns\.ids is 'tokens_x'"):
        make(data=DATA, columns={"ids": "tokens_x"})
    with pytest.raises(BadSource, match="is string, expected list"):
        make(data=pa.table({"ids": ["a"]}), supervise_all=True)
    with pytest.raises(BadSource, match="lists of double, expected integers"):
        make(data=pa.table({"ids": [[1.0]]}), supervise_all=True)
    (tmp_path / "a.jsonl").write_text(lines(JSON_ROWS))
    (tmp_path / "b.jsonl").write_text(lines([{"ids": [1, 2], "loss_mask": [1, 1]}]))
    with pytest.raises(BadSource, match=r"columns ids, loss_mask, but .* has input_ids, loss_mask"):
        make(tmp_path)
    with pytest.raises(BadSource, match="holds conversations, but no tokenizer"):
        make(data=pa.table({"messages": [[{"role": "user", "content": "x"}]]}))


def test_the_vocabulary_must_be_known(make: Any) -> None:
    with pytest.raises(BadSource, match=r"rows\.vocabulary: not set"):
        make(data=DATA, vocabulary=None)
