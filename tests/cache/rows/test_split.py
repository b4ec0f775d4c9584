"""The split is what was asked for, or it is said: never an empty side found after the training, never a leak."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cache.chat.conversation import ReadCounts, read_conversations
from cache.config import Columns
from cache.errors import BadSource
from cache.source.first_text import first_texts
from cache.source.place import Place


def said(system: str | None, user: str) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": user}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize(
    ("text", "conversations", "problem"),
    [
        (lambda i: "Solve the task above.", 500, "0 of 500 rows are held out"),
        (lambda i: f"Task {i}.", 500, None),
        (lambda i: "Solve the task above.", 20, None),  # so few rows may all be on one side
    ],
)
def test_a_side_without_rows_is_found_before_the_training(
    tmp_path: Path, make: Any, text: Any, conversations: int, problem: str | None
) -> None:
    table = pa.table({
        "input_ids": [[1, 2, i % 9] for i in range(conversations)],
        "loss_mask": [[0, 1, 1]] * conversations,
        "messages": [said(None, text(i)) for i in range(conversations)],
    })  # fmt: skip
    if problem is None:
        make(data=table, held_out=0.05)
        return
    with pytest.raises(BadSource, match=f"{problem}.* begin with 1 different texts"):
        make(data=table, held_out=0.05)
    assert make(data=table, held_out=0.0).manifest.rows == conversations


def test_a_share_that_is_far_from_what_was_asked_is_said(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    texts = ["always the same" if i % 2 else f"another {i}" for i in range(1000)]
    table = pa.table({
        "input_ids": [[1, 2, 3]] * 1000, "loss_mask": [[0, 1, 1]] * 1000, "prompt": texts,
    })  # fmt: skip
    with caplog.at_level(logging.WARNING, "cache"):
        make(data=table, held_out=0.5)
    assert "rows.held_out=0.5 asks for about 500: they begin with 501 different texts" in caplog.text


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_pieces_of_one_conversation_are_on_one_side_whatever_text_is_called(make: Any, kind: pa.DataType) -> None:
    """polars writes large_string."""
    message = pa.struct([("role", kind), ("content", kind)])
    told = pa.array([said("a system", "one question")] * 200, pa.list_(message))
    cache = make(data=pa.table({
        "input_ids": [[1, 2, i % 9] for i in range(200)], "loss_mask": [[0, 1, 1]] * 200, "messages": told,
    }), held_out=0.04)  # fmt: skip
    assert len(set(cache.split.tolist())) == 1


def test_conversations_and_tokenised_rows_begin_alike() -> None:
    """By system and user text: rows of one question under many system texts are many."""
    opened = [{"role": "assistant", "content": "x"}, *said(None, "q")]
    rows = [said("s", "q"), said(None, "q"), said("t", "q"), said("s", "r"), opened]
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    batch = pa.table({"messages": [json.dumps(row) for row in rows]})
    counts = ReadCounts(Counter(), Counter(), Counter())
    read = read_conversations(batch, Columns(), "all", counts, Place("x", 0))
    beginnings = [one.split_text for one in read]
    assert beginnings == first_texts(pa.array(rows, pa.list_(message)))
    assert len(set(beginnings)) == 4
