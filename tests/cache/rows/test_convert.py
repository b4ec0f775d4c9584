"""Conversations pass the same rules as rows that came tokenised; here with a tokenizer of one id a character."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_rows import masks_of, rows_of
from letters import OneIdACharacter, conversation, ids, put

from cache import build as writer
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadRow, BadSource
from cache.slices import make as making


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> OneIdACharacter:
    made = OneIdACharacter()
    monkeypatch.setattr(making, "load_chat", lambda *_: made)
    return made


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
    assert chat.calls == [[f"line {number} of {tmp_path / 'chat.jsonl'}" for number in (1, 2, 4, 7)]]
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
    assert chat.calls == [["row 0 of the table in memory", "row 1 of the table in memory"]]


def test_a_line_without_a_conversation_is_named(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(conversation("q", "yes")) + '\n{"text": "x"}\n')
    with pytest.raises(BadRow, match=r"line 2 of .*: keys text, expected messages among them"):
        make(path)


def test_either_name_of_the_column_in_one_file(make: Any, chat: OneIdACharacter, tmp_path: Path) -> None:
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
    assert [progress.rows for progress in seen] == [256, 512, 600, 600]  # tokenised, then written
    assert seen[-1].share == 1.0
    assert seen[-1].bytes == TokenCache.open(path).manifest.tokens * 3
    assert all(a.seconds <= b.seconds for a, b in pairwise(seen))
