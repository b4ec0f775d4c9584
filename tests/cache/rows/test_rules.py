"""The written rules, each with what it counts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_rows import masks_of, rows_of, table

from cache.errors import BadRow, BadSource
from cache.ragged import Spans
from cache.rows.split import hashes_of_ids, sides
from cache.source.first_text import first_texts, hashes_of_texts

GOOD = [1, 2, 3]


def test_a_prompt_longer_than_the_limit_is_dropped_after_the_cut(make: Any) -> None:
    rows = [list(range(23)), [5, 6, 7, 8]]
    masks = [[0] * 20 + [1] * 3, [0, 0, 1, 1]]
    cache = make(data=table(rows, masks), max_tokens=8)
    assert rows_of(cache) == [[5, 6, 7, 8]]
    assert cache.manifest.dropped == {"no_anchor": 1}
    assert cache.manifest.truncated == 1
    with pytest.raises(BadSource, match=r"no row is left of 1.*dropped: no_anchor 1"):
        make(data=table(rows[:1], masks[:1]), max_tokens=8)


@pytest.mark.parametrize("kept", [0, 1])
def test_rows_without_a_supervised_pair_never_make_a_cache(make: Any, kept: int) -> None:
    masks = [[0, 0, 0], [1, 0, 1], [0, 1, 1]]
    if not kept:
        with pytest.raises(BadSource, match="no row is left of 2"):
            make(data=table([GOOD] * 2, masks[:2]))
    else:
        cache = make(data=table([GOOD] * 3, masks))
        assert (cache.manifest.rows, cache.manifest.supervised_tokens) == (1, 2)


def test_a_row_of_one_token_has_nothing_to_predict(make: Any) -> None:
    cache = make(data=table([[7], [7, 8]]))
    assert rows_of(cache) == [[7, 8]]
    assert cache.manifest.dropped == {"too_short": 1}


def test_drop_looks_at_the_row_before_any_cut(make: Any) -> None:
    cache = make(data=table([list(range(20)), GOOD]), max_tokens=8, overflow="drop")
    assert rows_of(cache) == [GOOD]
    assert cache.manifest.dropped == {"too_long": 1}
    assert cache.manifest.truncated == 0


def test_an_empty_row_in_front(make: Any) -> None:
    cache = make(data=table([[], [1, 2]]))
    assert cache.offsets.tolist() == [0, 2]
    assert cache.source_row.tolist() == [1]
    assert cache.manifest.dropped == {"empty": 1}


def test_the_mask_is_cut_with_the_ids(make: Any) -> None:
    mask = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    for length in range(7, 17):
        cache = make(data=table([list(range(16))], [mask]), max_tokens=length)
        assert masks_of(cache) == [mask[:length]]


def test_what_is_cut_off_is_counted(make: Any) -> None:
    rows = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    cut = make(data=table(rows), max_tokens=4)
    assert (cut.manifest.tokens, cut.manifest.truncated, cut.manifest.truncated_tokens) == (9, 1, 1)
    split = make(data=table(rows), max_tokens=3, overflow="split")
    assert rows_of(split) == [[1, 2, 3], [4, 5], [6, 7], [8, 9, 10]]
    assert split.source_row.tolist() == [0, 0, 1, 2]


def test_split_counts_a_lost_piece_apart_from_a_lost_row(make: Any) -> None:
    rows, masks = [[1, 2, 3, 4, 5], [1, 2, 3, 4]], [[0, 0, 1, 1, 1], [0, 1, 1, 0]]
    cache = make(data=table(rows, masks), max_tokens=2, overflow="split", max_dropped=0.5)
    assert rows_of(cache) == [[3, 4]]
    assert cache.manifest.dropped == {"no_anchor": 1, "no_anchor_piece": 2}
    assert cache.manifest.dropped_share == 0.5


def test_supervise_last_holds_for_rows_that_came_tokenised(make: Any) -> None:
    mask = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    cache = make(data=table([list(range(16))], [mask]), supervise="last")
    assert np.flatnonzero(cache.mask).tolist() == [13, 14, 15]
    cut = make(data=table([list(range(16))], [mask]), supervise="last", max_tokens=15)
    assert np.flatnonzero(cut.mask).tolist() == [13, 14]


def test_rows_end_where_the_source_says_and_nowhere_else(make: Any) -> None:
    rows = [[5, 6, 7, 8], [9, 0], [3, 4, 0]]
    cache = make(data=table(rows))
    assert cache.offsets[1:].tolist() == [4, 6, 9]
    assert cache.ids.nbytes == cache.manifest.tokens * cache.ids.itemsize == int(cache.lengths.sum()) * 2


def test_groups_are_kept_by_name_and_others_do_not_count_as_dropped(make: Any) -> None:
    domains = ["math", "code", None, "math", "code"]
    rows = [GOOD, [], None, [4, 5], [1]]
    whole = make(data=table(rows, domain=pa.array(domains)))
    assert [whole.manifest.group_names[i] for i in whole.group] == ["math", "math"]
    chosen = make(data=table(rows, domain=pa.array(domains)), groups=["math"], max_dropped=0.0)
    assert rows_of(chosen) == [GOOD, [4, 5]]
    assert chosen.manifest.dropped == {"other_group": 3}
    assert chosen.manifest.dropped_share == 0
    with pytest.raises(BadSource, match=r"rows\.groups is set, but no column"):
        make(data=table([GOOD]), groups=["math"])


def test_too_many_drops_are_refused_also_when_the_cache_is_there(make: Any) -> None:
    data = table([GOOD, [1], GOOD, GOOD])
    with pytest.raises(BadSource, match=r"25\.0% of the rows are dropped, expected at most 10\.0%.*too_short 1"):
        make(data=data, max_dropped=0.1)
    make(data=data, max_dropped=0.25)
    with pytest.raises(BadSource, match=re.escape("rows.max_dropped")):
        make(data=data, max_dropped=0.1)


@pytest.mark.parametrize(("value", "shown"), [(-1, "-1"), (100, "100"), (2**31 - 1, "2147483647")])
def test_an_id_outside_the_vocabulary_is_named(make: Any, value: int, shown: str) -> None:
    rows = [[1, 2], None, [3, 4, value]]
    with pytest.raises(BadRow, match=rf"row 2 of .*input_ids: token id {shown} is not in 0\.\.99"):
        make(data=table(rows), vocabulary=100)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int64()])
def test_a_negative_id_is_seen_in_every_width(make: Any, kind: pa.DataType) -> None:
    ids = pa.array([[1, 2], [3, -1]], pa.list_(kind))
    with pytest.raises(BadRow, match=r"row 1 of .*: token id -1 is not in"):
        make(data=pa.table({"input_ids": ids}), supervise_all=True, vocabulary=70_000)


def test_wide_vocabularies_are_stored_wide(make: Any) -> None:
    ids = [65535, 65536, 70000, 151669]
    wide = make(data=table([ids]), vocabulary=151936)
    assert wide.ids.dtype == np.uint32
    assert wide.ids.tolist() == ids
    narrow = make(data=table([[0, 65535]]), vocabulary=65536)
    assert narrow.ids.dtype == np.uint16
    assert narrow.ids.tolist() == [0, 65535]
    with pytest.raises(BadRow, match="token id 65536"):
        make(data=table([ids]), vocabulary=65536)


def test_a_null_inside_a_row_is_named(make: Any) -> None:
    ids = pa.array([[1, 2], [3, None, 4]], pa.list_(pa.int32()))
    data = pa.table({"input_ids": ids, "loss_mask": pa.array([[1, 1], [1, 1, 1]], pa.list_(pa.int8()))})
    with pytest.raises(BadRow, match=r"row 1 of .*column input_ids: a null at position 1"):
        make(data=data)


def test_a_null_hidden_under_a_null_row_is_harmless(make: Any) -> None:
    validity = pa.array([True, None, True]).buffers()[0]
    offsets = pa.py_buffer(np.array([0, 2, 5, 7], dtype=np.int32))
    child = pa.array([1, 2, None, 9, None, 3, 4], pa.int32())
    ids = pa.Array.from_buffers(pa.list_(pa.int32()), 3, [validity, offsets], children=[child])
    cache = make(data=pa.table({"input_ids": ids}), supervise_all=True)
    assert rows_of(cache) == [[1, 2], [3, 4]]


def test_a_mask_of_other_length_is_named(make: Any) -> None:
    with pytest.raises(BadRow, match=r"row 1 of .*loss_mask has 2 values, expected 3"):
        make(data=table([GOOD, GOOD], [[1, 1, 1], [1, 1]]))


def test_a_mask_value_that_is_no_mask_is_named(make: Any) -> None:
    with pytest.raises(BadRow, match=r"row 2 of .*a loss mask value of 5"):
        make(data=table([[1], GOOD, GOOD], [[1], [1, 1, 1], [0, 1, 5]]))


def test_labels_supervise_where_they_are_not_minus_100(make: Any) -> None:
    labels = pa.array([[-100, 2, 3]], pa.list_(pa.int64()))
    data = pa.table({"input_ids": pa.array([GOOD]), "labels": labels})
    assert masks_of(make(data=data)) == [[0, 1, 1]]


def test_shifted_labels_are_refused(make: Any) -> None:
    labels = pa.array([[2, 3, -100]], pa.list_(pa.int64()))
    with pytest.raises(BadRow, match=r"label 2 where column input_ids has 1"):
        make(data=pa.table({"input_ids": pa.array([GOOD]), "labels": labels}))


def test_without_a_mask_everything_is_supervised_only_if_the_user_says_so(make: Any) -> None:
    data = pa.table({"input_ids": pa.array([GOOD])})
    with pytest.raises(BadSource, match=r"no loss mask.*rows\.supervise_all=true"):
        make(data=data)
    assert masks_of(make(data=data, supervise_all=True)) == [[1, 1, 1]]


def test_two_masks_are_refused_until_one_is_named(make: Any) -> None:
    data = table([GOOD], [[0, 1, 1]], labels=pa.array([[-100, -100, 3]]))
    with pytest.raises(BadSource, match="several loss masks, loss_mask and labels"):
        make(data=data)
    assert masks_of(make(data=data, columns={"mask": "loss_mask"})) == [[0, 1, 1]]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_the_split_takes_its_share_and_keeps_equal_rows_together(share: float) -> None:
    rng = np.random.default_rng(0)
    length = rng.integers(2, 200, 4000)
    ids = Spans(rng.integers(0, 50_000, int(length.sum())), np.cumsum(length) - length, length)
    side = sides(hashes_of_ids(ids), share)
    # Four standard deviations of a fair draw.
    assert abs(side.mean() - share) <= 4 * (share * (1 - share) / 4000) ** 0.5
    moved = Spans(np.concatenate([[9], ids.values]), ids.start + 1, ids.length)
    assert (sides(hashes_of_ids(moved), share) == side).all()
    texts = [f"question {i}" for i in range(4000)]
    drawn = sides(hashes_of_texts(texts), share)
    assert abs(drawn.mean() - share) <= 4 * (share * (1 - share) / 4000) ** 0.5


def test_rows_that_begin_alike_are_not_all_on_one_side() -> None:
    rows = np.concatenate([np.concatenate([np.arange(500), [row] * 40]) for row in range(400)])
    spans = Spans(rows, np.arange(400) * 540, np.full(400, 540))
    assert 0.3 < sides(hashes_of_ids(spans), 0.5).mean() < 0.7


def test_pieces_of_a_row_are_on_its_side(make: Any) -> None:
    rows = [list(range(i, i + 10)) for i in range(50)]
    cache = make(data=table(rows), max_tokens=3, overflow="split", held_out=0.5)
    for row in range(50):
        assert len(set(cache.split[cache.source_row == row].tolist())) == 1
    assert 0 < cache.split.mean() < 1
    assert sorted([*cache.rows(0), *cache.rows(1)]) == list(range(cache.manifest.rows))


def test_the_length_histogram_counts_every_row(make: Any) -> None:
    cache = make(data=table([[1] * n for n in (2, 3, 4, 5, 8, 9)]))
    assert cache.manifest.length_histogram == ((2, 1), (4, 2), (8, 2), (16, 1))


def said(*turns: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, turns, strict=False)]


def regenerated(count: int) -> list[dict[str, Any]]:
    """As regeneration writes them where a template rewrites history: each answer a row, with all that came before."""
    rows = []
    for i in range(count):
        talk = said(f"question {i}", f"answer {i}", "and then?", f"more {i}")
        rows += [
            {
                "row": i,
                "messages": talk[:2],
                "question": "0" * 32,
                "input_ids": [1, i, 2, 3],
                "loss_mask": [0, 0, 1, 1],
            },
            {
                "row": i,
                "messages": talk,
                "question": "0" * 32,
                "input_ids": [1, i, 9, 5, 6],
                "loss_mask": [0, 0, 0, 1, 1],
            },
        ]
    return rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "prompt"])
def test_rows_of_one_conversation_stay_on_one_side_though_they_came_tokenised(
    make: Any, tmp_path: Path, kind: str
) -> None:
    rows = regenerated(200)
    if kind == "prompt":
        rows = [{"prompt": row["messages"][0]["content"]} | row for row in rows]
        rows = [{name: value for name, value in row.items() if name != "messages"} for row in rows]
    source = tmp_path / f"answers.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sides_found = make(source, held_out=0.4).split.reshape(200, 2)
    assert (sides_found[:, 0] == sides_found[:, 1]).all()
    assert sides_found[:, 0].tolist() == sides(hashes_of_texts([f"question {i}" for i in range(200)]), 0.4).tolist()


def test_the_side_is_that_of_the_same_conversation_as_text() -> None:
    """System text before, parts that are no text, a row without messages: what cannot be told is drawn by its ids."""
    talks = [
        [{"role": "system", "content": "s"}, *said("question 1", "a")],
        [{"from": "human"}],
        None,
        said("question 1", "b"),
        [],
        [{"role": "assistant", "content": "only"}],
    ]
    column = [None if talk is None else [{"role": None, "content": None} | m for m in talk] for talk in talks]
    texts = first_texts(pa.array(column, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))))
    assert texts == ["s\x1equestion 1", None, None, "question 1", None, "only"]
    sliced = pa.array(column, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))).slice(3, 3)
    assert first_texts(sliced) == ["question 1", None, "only"]


def test_odd_messages_beside_ids_cost_no_row(make: Any, tmp_path: Path) -> None:
    rows = regenerated(2)
    rows[1]["messages"][2]["content"] = [{"type": "text", "text": "and then?"}]
    rows[2]["messages"] = "text"
    rows[3].pop("messages")
    source = tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rows_of(make(source, held_out=0.1)) == [row["input_ids"] for row in rows]
