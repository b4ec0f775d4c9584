"""Conversations pass the same rules as rows that came tokenised; here with a tokenizer of one id a character."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_rows import masks_of, rows_of

from cache import writer
from cache.config import Columns, RowsConfig
from cache.errors import BadRow, BadSource
from cache.ragged import Ragged, Tokenised, offsets_of
from cache.store import TokenCache


class OneIdACharacter:
    """A question gives zeros in the mask, each answer to it ones and a row of its own; `bad` is refused by a rule."""

    stop_ids = (0,)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[tuple[int, int, str, bool]] = []
        self.noted = {"shortened": 1}

    def tokenise(
        self, batch: pa.RecordBatch, columns: Columns, first_row: int, source: str, *, lines: bool = False
    ) -> Tokenised:
        self.calls.append((first_row, batch.num_rows, source, lines))
        rows: list[tuple[int, str, str]] = []
        bad = 0
        for index, value in enumerate(batch.column(columns.messages).to_pylist()):
            messages = json.loads(value) if isinstance(value, str) else value
            if messages[0]["content"] == "bad":
                bad += 1
                continue
            if messages[0]["content"] == "worse":
                raise BadRow(f"{'line' if lines else 'row'} {first_row + index + lines} of {source}")
            rows += [(index, messages[0]["content"], answer["content"]) for answer in messages[1:]]
        values = np.array([ord(letter) for _, question, answer in rows for letter in question + answer], dtype=np.int64)
        mask = np.array([bit for _, q, a in rows for bit in [0] * len(q) + [1] * len(a)], dtype=np.uint8)
        offsets = offsets_of(np.array([len(q) + len(a) for _, q, a in rows], dtype=np.int64))
        return Tokenised(
            tokens=Ragged(values, mask, offsets),
            row=np.array([index for index, _, _ in rows], dtype=np.int64),
            split_text=[question for _, question, _ in rows],
            dropped={"refused": bad} if bad else {},
            answers=len(rows),
        )


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> OneIdACharacter:
    made = OneIdACharacter()
    monkeypatch.setattr(writer, "_chat", lambda *_: made)
    return made


def conversation(question: str, *answers: str, domain: str = "a") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    messages += [{"role": "assistant", "content": answer} for answer in answers]
    return {"messages": messages, "domain": domain}


def put(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_conversations_go_through_the_rules(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    rows = [
        conversation("ask", "yes", "no"),
        conversation("bad", "x"),
        conversation("short", "y"),  # one supervised token: no legal anchor
        conversation("long question", "answer"),  # its answer lies behind the cut
        conversation("cut", "through"),
    ]
    cache = make(put(tmp_path / "chat.jsonl", rows), max_tokens=8)
    assert rows_of(cache) == [ids("askyes"), ids("askno"), ids("cutthrou")]
    assert masks_of(cache) == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert cache.source_row.tolist() == [0, 0, 4]
    manifest = cache.manifest
    assert manifest.dropped == {"refused": 1, "no_anchor": 2}
    assert manifest.dropped_share == 3 / 5
    assert (manifest.source_rows, manifest.answers, manifest.truncated) == (5, 3, 2)
    assert manifest.noted == {"shortened": 1}


def test_a_lost_row_of_a_kept_conversation_is_a_piece(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    cache = make(put(tmp_path / "chat.jsonl", [conversation("q", "yes", "n")]), max_dropped=0.0)
    assert rows_of(cache) == [ids("qyes")]
    assert cache.manifest.dropped == {"no_anchor_piece": 1}


def test_other_groups_are_not_tokenised_and_rows_keep_their_numbers(
    make: Any, chat: OneIdACharacter, tmp_path: Path
) -> None:
    domains = ["a", "a", "b", "a", "b", "b", "a"]
    rows = [conversation(f"q{i}", "yes", domain=domain) for i, domain in enumerate(domains)]
    cache = make(put(tmp_path / "chat.jsonl", rows), groups=["a"])
    assert cache.source_row.tolist() == [0, 1, 3, 6]
    assert [(first, count) for first, count, _, _ in chat.calls] == [(0, 2), (3, 1), (6, 1)]
    assert all(lines for *_, lines in chat.calls)
    assert cache.manifest.dropped == {"other_group": 3}
    rows[3] = conversation("worse", "x")
    with pytest.raises(BadRow, match=r"line 4 of .*chat\.jsonl"):
        make(put(tmp_path / "chat.jsonl", rows), groups=["a"])


def test_the_split_hashes_the_first_user_text(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    rows = [conversation(f"question {i % 60}", "yes", f"answer {i}") for i in range(240)]
    cache = make(put(tmp_path / "chat.jsonl", rows), held_out=0.3)
    sides: dict[int, set[int]] = {}
    for row, side in zip(cache.source_row.tolist(), cache.split.tolist(), strict=True):
        sides.setdefault(row % 60, set()).add(side)
    assert all(len(found) == 1 for found in sides.values())
    assert 0.1 < cache.split.mean() < 0.5


def test_columns_of_structs_and_a_table_in_memory(make: Any, chat: OneIdACharacter) -> None:
    data = pa.Table.from_pylist([conversation("q", "yes"), conversation("r", "no")])
    assert rows_of(make(data=data)) == [ids("qyes"), ids("rno")]
    assert chat.calls == [(0, 2, "the table in memory", False)]


def test_a_line_without_a_conversation_is_named(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(conversation("q", "yes")) + '\n{"text": "x"}\n')
    with pytest.raises(BadRow, match=r"line 2 of .*: keys text, expected messages among them"):
        make(path)


def test_A17_either_name_of_the_column_in_one_file(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    rows = [conversation("q", "yes"), conversation("r", "no")]
    rows[1]["conversations"] = rows[1].pop("messages")
    assert rows_of(make(put(tmp_path / "chat.jsonl", rows))) == [ids("qyes"), ids("rno")]


def test_an_id_of_the_tokenizer_beyond_the_vocabulary(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    with pytest.raises(BadRow, match=r"row 0|line 1 of .*messages: token id 8364 is not in 0\.\.999"):
        make(put(tmp_path / "chat.jsonl", [conversation("q", "€€")]))


def test_conversations_need_a_tokenizer(tmp_path: Path) -> None:
    source = put(tmp_path / "chat.jsonl", [conversation("q", "yes")])
    with pytest.raises(BadSource, match=r"no tokenizer was given\. Set target\.model"):
        writer.build(RowsConfig(source=str(source), vocabulary=10), home=tmp_path, tokenizer=None, vocabulary=None)


def test_progress_reports_rows_bytes_and_share(chat: OneIdACharacter, tmp_path: Path) -> None:
    source = put(tmp_path / "chat.jsonl", [conversation(f"q{i}", "yes") for i in range(600)])
    seen: list[writer.Progress] = []
    path = writer.build(
        RowsConfig(source=str(source), vocabulary=1000),
        home=tmp_path,
        tokenizer=None,
        vocabulary=None,
        progress=seen.append,
    )
    assert [progress.rows for progress in seen] == [256, 512, 600]
    assert seen[-1].share == 1.0
    assert seen[-1].bytes == TokenCache.open(path).manifest.tokens * 3
    assert all(a.seconds <= b.seconds for a, b in pairwise(seen))
