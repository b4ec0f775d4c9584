"""What is asked: any accepted source → system and user turns, by the written rules."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from cache.config import Columns, RowsConfig
from cache.errors import BadRow, BadSource
from dflash.answers.parameters import GenerationConfig
from dflash.answers.questions import Question, earlier_keys, questions, rows_wanted

C0 = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "no"},
]
FROM = {"user": "human", "assistant": "gpt"}


def read(tmp_path: Path, rows: list[Any], **given: Any) -> list[Question]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(questions(RowsConfig(source=str(file), **given)))


def said(question: Question) -> list[list[str]]:
    return [[f"{turn['role'][0]}:{turn['content']}" for turn in stretch] for stretch in question.stretches]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": C0},
        {"messages": C0[:3]},
        {"conversations": [{"from": FROM[m["role"]], "value": m["content"]} for m in C0]},
        {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in C0]},
        {"messages": C0, "input_ids": [1, 2], "loss_mask": [0, 1]},  # earlier answers, answered anew
    ],
    ids=["A17 role", "no last answer", "A17 from", "A21 parts", "with ids"],
)
def test_shapes_ask_the_same(row: dict[str, Any], tmp_path: Path) -> None:
    (question,) = read(tmp_path, [row])
    assert said(question) == [["u:hi"], ["u:go"]]
    assert question.key == read(tmp_path, [{"messages": C0}])[0].key


def test_prompts_of_text(tmp_path: Path) -> None:
    texts = ["plain", '["a list?"]x', "[1, 2]", '"quoted"']
    (tmp_path / "as lines").mkdir()
    lines = read(tmp_path / "as lines", [{"prompt": text} for text in texts])
    pa.parquet.write_table(pa.table({"prompt": texts}), tmp_path / "rows.parquet")
    column = list(questions(RowsConfig(source=str(tmp_path / "rows.parquet"))))
    assert [said(one) for one in lines] == [said(one) for one in column] == [[[f"u:{text}"]] for text in texts]
    named = read(tmp_path, [{"q": "hi"}], columns=Columns(messages="q"))
    assert said(named[0]) == [["u:hi"]]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("s", None),
        ("uua", [["u", "u"]]),
        ("aua", [["u"]]),
        ("uau", [["u"], ["u"]]),
        ("suaua", [["s", "u"], ["u"]]),
        ("suaasu", [["s", "u"], ["s", "u"]]),
        ("uatau", [["u"]]),
    ],
)
def test_role_orders(roles: str, expected: list[list[str]] | None, tmp_path: Path) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[letter], "content": f"{i}"} for i, letter in enumerate(roles)]
    (question,) = read(tmp_path, [{"messages": messages}])
    if expected is None:
        assert (question.stretches, question.refused) == ((), "no_user_turn")
    else:
        assert [[turn["role"][0] for turn in stretch] for stretch in question.stretches] == expected


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for form in ('{"messages":[{"role":"user","content":"%s"}]}\n', '{"prompt":"%s"}\n'):
        file.write_text(form % "\\ud83d x" + form % "\\ud83d\\ude00")
        assert [said(one) for one in questions(RowsConfig(source=str(file)))] == [[["u:\ufffd x"]], [["u:\U0001f600"]]]


def test_numbers_count_every_row_and_domains_choose(tmp_path: Path) -> None:
    rows = [{"id": i, "domain": "ab"[i % 2], "messages": C0} for i in range(600)]
    found = read(tmp_path, rows, groups=["b"])
    assert [(one.row, one.identity, one.domain) for one in found] == [(i, f"{i}", "b") for i in range(1, 600, 2)]
    config = RowsConfig(source=str(tmp_path / "rows.jsonl"), groups=["b"])
    assert rows_wanted(config, GenerationConfig(rows=3)) == {1, 3, 5}


def test_what_is_no_conversation_stops_by_line(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match=r"line 2 of .*rows\.jsonl: a message has the keys who"):
        read(tmp_path, [{"messages": C0}, {"messages": [{"who": "me"}]}])
    with pytest.raises(BadSource, match=r"columns nothing, expected conversations"):
        read(tmp_path, [{"nothing": 1}])


def test_tools_are_part_of_the_question(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools, without = read(tmp_path, [{"messages": C0, "tools": tools}, {"messages": C0, "tools": None}])
    assert with_tools.tools == tools
    assert without.tools is None
    assert with_tools.key != without.key


def test_earlier_answers_may_end_in_half_a_line(tmp_path: Path) -> None:
    (question,) = read(tmp_path, [{"messages": C0}])
    line = json.dumps({"row": 0, "parts": [{"question": question.key}, {"question": question.key}]})
    file = tmp_path / "shard-00000.jsonl"
    file.write_text(f"{line}\n{line[:20]}")
    assert earlier_keys(tmp_path) == {question.key: 1}
    file.write_text(f"{line[:20]}\n{line}\n")
    with pytest.raises(BadSource, match="line 1 of"):
        earlier_keys(tmp_path)
    with pytest.raises(BadSource, match="no answers in"):
        earlier_keys(tmp_path / "nowhere")
