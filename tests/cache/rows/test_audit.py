"""What the manifest and `inspect` say of conversations, and the results that no build accepts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy import PLAIN, E, save_tokenizer

from cache.__main__ import main
from cache.build import build
from cache.chat.template import BadTemplate
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadSource
from cache.rows.audit import Audit

Prepare = Callable[..., TokenCache]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    def run(lines: list[Any], template: str = PLAIN, **rows: Any) -> TokenCache:
        file = tmp_path / "chat.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = RowsConfig(source=str(file), **{"held_out": 0.0, "max_dropped": 1.0} | rows)
        directory = save_tokenizer(tmp_path / "tokenizer", template)
        return TokenCache.open(build(config, home=tmp_path / "home", tokenizer=directory, vocabulary=None))

    return run


def talk(*turns: str, **beside: Any) -> dict[str, Any]:
    """`u:hi`, `a:ok`, …"""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "x": "narrator"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]} | beside


MIXED = [
    talk("u:hi", "a:ok", "u:go", "a:no"),  # 16 tokens, 6 of them supervised, in 2 answers
    talk("s:be", "u:h", "a:yes", "u:bye"),  # 12 tokens, 4 supervised, 1 answer; the last turn is cut
    talk("u:q", "a: "),  # no answer
    talk("u:q", "x:once", "a:b"),  # a role that nobody knows
    talk("u:q", "a:" + "y" * 30),  # 36 tokens, 31 supervised
]


def test_manifest_counts_by_role_and_by_row(prepare: Prepare) -> None:
    manifest = prepare(MIXED).manifest
    assert manifest.messages == {
        "assistant: dropped": 1,
        "assistant: read": 5,
        "assistant: supervised": 4,
        "system: read": 1,
        "user: cut": 1,
        "user: dropped": 1,
        "user: read": 6,
    }
    assert manifest.dropped == {"no_answer": 1, "unknown_role: narrator": 1}
    assert manifest.noted == {"empty answer, not supervised": 1, "messages after the last answer, cut": 1}
    assert manifest.supervised_shares == ((4, 2), (9, 1))  # 6/16 and 4/12 are at most 40 %, 31/36 at most 90 %
    assert manifest.answers_a_row == ((1, 2), (2, 1))
    assert sum(n * rows for n, rows in manifest.answers_a_row) == manifest.answers


def test_manifest_is_of_the_rows_that_are_kept(prepare: Prepare) -> None:
    manifest = prepare(MIXED, max_tokens=8).manifest
    assert manifest.supervised_shares == (
        (4, 1),
        (5, 1),
    )  # 3 of 8, and 4 of 8; the row with a system text lost its answer
    assert manifest.answers_a_row == ((1, 2),)


def test_a_window_that_begins_inside_an_answer_holds_one(prepare: Prepare) -> None:
    manifest = prepare([talk("u:hi", "a:" + "y" * 20, "u:hi", "a:ok")], max_tokens=10, overflow="split").manifest
    # 5 + 21 + 5 + 3 tokens: 5 of the first window, 10 and 6 of the next two, and 3 of the last four.
    assert manifest.supervised_shares == ((5, 1), (6, 1), (8, 1), (10, 1))
    assert manifest.answers_a_row == ((1, 4),)


def test_inspect_shows_the_audit(prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(prepare(MIXED).path)]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert {"dropped 2 (40.0%)", "dropped no_answer 1", "dropped unknown_role: narrator 1"} <= set(lines)
    assert "read supervised cut dropped" in lines
    assert "assistant 5 4 0 1" in lines
    assert "user 6 0 1 1" in lines
    assert any(line.startswith("≤ 40 %") and line.endswith(" 2") for line in lines)
    assert "rows by answers" in lines


def test_no_supervision_at_all_stops_the_build(prepare: Prepare) -> None:
    with pytest.raises(BadSource, match=r"no row is left of 2, expected at least one; dropped: no_answer 2"):
        prepare([talk("u:q"), talk("u:q", "a:")])
    with pytest.raises(BadSource, match=r"no row is left of 1.*dropped: no_anchor 1"):
        prepare([talk("u:question", "a:ok")], max_tokens=8)


def test_one_row_that_is_all_supervised_stops_the_build(prepare: Prepare) -> None:
    everything = (
        "{% for m in messages %}{% if messages[0].content == 'all' or m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}[E]{% endgeneration %}{% else %}[U]{{ m.content }}[E]{% endif %}{% endfor %}"
    )
    fine = talk("u:hi", "a:ok")
    assert prepare([fine], everything).manifest.rows == 1
    with pytest.raises(BadTemplate, match=r"line 2 of .* marks every token as an answer"):
        prepare([fine, talk("u:all", "a:ok"), fine], everything)


def test_everything_supervised_stops_the_build() -> None:
    with pytest.raises(BadSource, match=r"rows\.jsonl: every token of every row is supervised"):
        Audit().refuse("rows.jsonl", 10, 10)
    Audit().refuse("rows.jsonl", 10, 9)


def test_more_than_max_dropped_stops_the_build(prepare: Prepare) -> None:
    lines = [talk("u:hi", "a:ok"), talk("u:q", "x:b")]
    with pytest.raises(BadSource, match=r"50\.0% of the rows are dropped.*unknown_role: narrator 1"):
        prepare(lines, max_dropped=0.4)
    assert prepare(lines, max_dropped=0.5).manifest.rows == 1


def test_a_turns_token_that_is_in_no_row_stops_the_build(prepare: Prepare) -> None:
    ends_answers = PLAIN.replace("[E]", "{{ '[E]' if m.role == 'assistant' else '.' }}")
    rows = [talk("u:hi", "a:okay", finished=False)] * 2
    with pytest.raises(BadSource, match=rf"\[E\] \({E}\): written around answers by the chat template, but in no row"):
        prepare(rows, ends_answers)
    assert prepare([*rows, talk("u:hi", "a:okay")], ends_answers).manifest.rows == 3
