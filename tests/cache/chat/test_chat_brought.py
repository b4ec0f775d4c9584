"""Rows as people bring them: each shape gives the ids and masks of the plain one, or is counted or refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from toy import E, U, save_tokenizer

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadRow, BadSource

TEMPLATE = (
    "{% if tools %}[BOS]{{ tools | tojson }}[E]{% endif %}"
    "{% for m in messages %}{{ {'assistant': '[A]', 'user': '[U]'}[m.role] or '[PAD]' + m.role }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments | tojson }}#{{ c.id }}>{% endfor %}"
    "{% if m.role == 'tool' %}#{{ m.tool_call_id }}{% endif %}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)
PLAIN = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}]}
CUT = {"messages": [{"role": "user", "content": "Rivers?"}, {"role": "assistant", "content": "The Loire, the"}]}
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TALK = [
    {"role": "user", "content": "How high?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4.1 m"},
    {"role": "assistant", "content": "4.1 metres."},
]
SYSTEM = {"role": "system", "content": "Be a sailor."}
NAN = float("nan")


@pytest.fixture
def bring(tmp_path: Path) -> Any:
    """Build the cache of lists of rows, each list a file of lines (or, as a table, a Parquet file)."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    number = iter(range(100))

    def run(*files: Any, **options: Any) -> TokenCache:
        directory = tmp_path / f"source-{next(number)}"
        directory.mkdir()
        for i, rows in enumerate(files):
            if isinstance(rows, pa.Table):
                pa.parquet.write_table(rows, directory / f"{i}.parquet")
            else:
                (directory / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RowsConfig(source=str(directory), **{"held_out": 0.0, "max_dropped": 1.0} | options)
        return TokenCache.open(build(config, home=tmp_path / "home", tokenizer=tokenizer, vocabulary=None))

    return run


def rows_of(cache: TokenCache) -> list[tuple[list[int], list[int]]]:
    pairs = zip(np.split(cache.ids, cache.offsets[1:-1]), np.split(cache.mask, cache.offsets[1:-1]), strict=True)
    return [(ids.tolist(), mask.tolist()) for ids, mask in pairs]


def supervised(cache: TokenCache) -> list[bytes]:
    """Each row's supervised bytes; an end of turn as a semicolon."""
    return [bytes(ord(";") if i == E else i for i, m in zip(*row, strict=True) if m) for row in rows_of(cache)]


def test_optional_keys_count_wherever_they_come_first(bring: Any) -> None:
    tool = {"messages": TALK, "tools": TOOLS}
    cut = CUT | {"finished": False}
    first = bring([tool | {"finished": True}, PLAIN, cut])
    later = bring([PLAIN, tool, cut])
    apart = bring([PLAIN], [tool], [cut])
    assert rows_of(first)[0] == rows_of(later)[1] == rows_of(apart)[1]
    assert rows_of(first)[2] == rows_of(later)[2] == rows_of(apart)[2]
    assert supervised(later)[2] == b"The Loire, the"
    assert b'"tide"' in bytes(i for i in rows_of(later)[1][0] if i < 256)


def test_domains_count_wherever_they_come_first_and_tables_may_lack_them(bring: Any) -> None:
    later = bring([PLAIN, PLAIN | {"domain": "sums"}, PLAIN | {"group": "games"}])
    assert [later.manifest.group_names[i] for i in later.group] == ["none", "sums", "games"]
    assert bring([PLAIN]).manifest.group_names == ["all"]
    tables = bring(pa.Table.from_pylist([PLAIN]), pa.Table.from_pylist([PLAIN | {"group": "a", "finished": False}]))
    assert tables.manifest.group_names == ["none", "a"]
    assert supervised(tables) == [b"4.;", b"4."]
    assert bring([PLAIN, PLAIN | {"about": "sums"}], columns={"group": "about"}).manifest.group_names == [
        "none",
        "sums",
    ]
    with pytest.raises(BadSource, match="no row has a value in it"):
        bring([PLAIN], columns={"group": "abuot"})


def test_a_column_of_domains_can_be_refused_and_switched_off(bring: Any) -> None:
    lists = [PLAIN | {"domain": ["a", "b"]}]
    with pytest.raises(BadRow, match=r"line 1 of .*column domain: \[\"a\", \"b\"\], expected the domain"):
        bring(lists)
    with pytest.raises(BadSource, match="column domain is list"):
        bring(pa.Table.from_pylist(lists))
    assert bring(lists, columns={"group": ""}).manifest.group_names == ["all"]


@pytest.mark.parametrize("value", [NAN, None])
def test_nan_is_null(bring: Any, value: Any) -> None:
    beside = dict.fromkeys(("tools", "domain", "finished", "system"), value)
    odd = bring([PLAIN | beside, PLAIN | {"domain": "sums"}])
    assert rows_of(odd) == rows_of(bring([PLAIN, PLAIN]))
    assert odd.manifest.group_names == ["none", "sums"]
    numbers = bring(pa.Table.from_pylist([PLAIN | {"finished": 0.0, "tools": NAN}, PLAIN | {"finished": NAN}]))
    assert supervised(numbers) == [b"4.", b"4.;"]
    silent = bring(
        [{"messages": [*PLAIN["messages"], {"role": "user", "content": "?"}, {"role": "assistant", "content": value}]}]
    )
    assert supervised(silent) == [b"4.;"]
    assert silent.manifest.noted["empty answer, not supervised"] == 1


def test_tools_and_conversations_as_json_text(bring: Any) -> None:
    plain = rows_of(bring([{"messages": TALK, "tools": TOOLS}]))
    text = {"messages": TALK, "tools": json.dumps(TOOLS)}
    assert rows_of(bring([text])) == rows_of(bring(pa.Table.from_pylist([text]))) == plain
    assert rows_of(bring([text | {"tools": [json.dumps(TOOLS[0])]}])) == plain
    assert rows_of(bring([{"messages": json.dumps(TALK), "tools": TOOLS}])) == plain
    none = bring([PLAIN | {"tools": tools} for tools in ("", " ", "[]", "null", None, [])])
    assert rows_of(none) == rows_of(bring([PLAIN])) * 6
    for rows in ([PLAIN | {"tools": "[not"}], pa.Table.from_pylist([PLAIN | {"tools": "[not"}])):
        with pytest.raises(BadRow, match=r"(line 1|row 0) of .*: tools is not JSON"):
            bring(rows)


def test_system_text_in_a_column_of_its_own(bring: Any) -> None:
    plain = rows_of(bring([{"messages": [SYSTEM, *PLAIN["messages"]]}]))
    for name in ("system", "system_prompt"):
        row = PLAIN | {name: SYSTEM["content"]}
        assert rows_of(bring([PLAIN, row]))[1:] == plain
        assert rows_of(bring(pa.Table.from_pylist([row]))) == plain
        assert rows_of(bring([{"prompt": "2+2?", "response": "4.", name: SYSTEM["content"]}])) == plain
    assert rows_of(bring([{"messages": [SYSTEM, *PLAIN["messages"]], "system": " Be a sailor."}])) == plain
    twice = bring([{"messages": [SYSTEM, *PLAIN["messages"]], "system": "Be a pirate."}, PLAIN])
    assert twice.manifest.dropped == {"system_texts_differ": 1}


@pytest.mark.parametrize(
    ("flag", "off", "on"),
    [("weight", 0, 1), ("train", False, True), ("trainable", "false", "true"), ("loss_mask", 0.0, 1.0)],
)
def test_an_answer_that_its_message_switches_off_is_context(bring: Any, flag: str, off: Any, on: Any) -> None:
    talk = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5", flag: off},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "No, 4.", flag: on},
    ]
    bare = [{key: value for key, value in message.items() if key != flag} for message in talk]
    made = [
        bring([{"messages": talk, "system": "s"}]),
        bring(pa.Table.from_pylist([{"messages": talk, "system": "s"}])),
    ]
    for cache in made:
        assert rows_of(cache)[0][0] == rows_of(bring([{"messages": bare, "system": "s"}]))[0][0]
        assert supervised(cache) == [b"No, 4.;"]
        assert cache.manifest.noted == {"answer switched off by its message, not supervised": 1}
    last = bring([{"messages": [*talk[:3], talk[3] | {flag: off}]}, PLAIN], supervise="last")
    assert last.manifest.dropped == {"every_answer_switched_off": 1}
    with pytest.raises(BadRow, match=f"{flag} of a message is 'some', expected 0"):
        bring([{"messages": [*talk[:3], talk[3] | {flag: "some"}]}])


def test_the_older_function_call(bring: Any) -> None:
    call = {"name": "tide", "arguments": '{"port": "Brest"}'}
    older = [
        TALK[0],
        {"role": "assistant", "content": None, "function_call": call},
        {**TALK[2], "role": "function"},
        TALK[3],
    ]
    assert rows_of(bring([{"messages": older}])) == rows_of(bring([{"messages": TALK}]))
    assert supervised(bring([{"messages": older}])) == [b'<tide{"port": "Brest"}#call00000>;4.1 metres.;']


def test_a_missing_call_id_is_nine_letters_and_digits_and_its_reply_has_it(bring: Any, tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 or not c.id.isalnum() %}"
        "{{ raise_exception('call id must be 9 letters or digits') }}{% endif %}{% endfor %}{% endfor %}" + TEMPLATE
    )
    (tmp_path / "strict.jinja").write_text(strict)
    long = [TALK[0], {**TALK[1], "tool_calls": [CALL | {"id": "call_0123456789"}]}, *TALK[2:]]
    made = bring([{"messages": TALK}, {"messages": long}], template=str(tmp_path / "strict.jinja"))
    assert made.manifest.dropped == {"template_refuses: call id must be 9 letters or digits": 1}
    assert bytes(i for i in rows_of(made)[0][0] if i < 256).count(b"#call00000") == 2


def test_parts_of_other_kinds(bring: Any) -> None:
    def parts(first: str, second: Any) -> dict[str, Any]:
        said = [{"type": first, "text": "2+2?"}], [second]
        return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]}

    text = parts("input_text", {"type": "output_text", "text": "4.", "annotations": []})
    made = bring([text, parts("text", {"type": "refusal", "refusal": "No."})])
    assert rows_of(made) == rows_of(bring([PLAIN]))
    assert made.manifest.dropped == {"part_not_text: refusal": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "2+2?", "input": "", "output": "4."},
        {"instruction": "2+2?", "output": "4."},
        {"question": "2+2?", "answer": "4."},
        {"conversation": PLAIN["messages"], "language": "English", "redacted": False},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4."}]},
        {"asked": "2+2?", "said": "4."},
    ],
)
def test_other_columns_of_conversations(bring: Any, row: dict[str, Any]) -> None:
    columns = {"prompt": "asked", "completion": "said"} if "asked" in row else {}
    plain = rows_of(bring([PLAIN]))
    for rows in ([row], pa.Table.from_pylist([row])):
        made = bring(rows, columns=columns)
        assert rows_of(made) == plain
        assert made.manifest.noted == {}


def test_the_input_of_an_instruction_follows_it(bring: Any) -> None:
    made = bring([{"instruction": "Add", "output": "4."}, {"instruction": "Add", "input": "2+2", "output": "4."}])
    assert rows_of(made)[1][0][:10] == [U, *b"Add\n\n2+2", E]


def test_keys_that_nobody_reads_are_noted_by_name(bring: Any) -> None:
    rows = [PLAIN, {"messages": [PLAIN["messages"][0], PLAIN["messages"][1] | {"prefix": True}], "rejected": "5"}]
    noted = {"key of a row that is not read: rejected": 1, "key of a message that is not read: prefix": 1}
    assert bring(rows).manifest.noted == noted
    table = bring(pa.Table.from_pylist([{"messages": rows[1]["messages"], "rejected": "5", "id": 1}]))
    assert table.manifest.noted == noted


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": None, "content": "x"}, "role is None, expected text"),
        ({"role": ["user"], "content": "x"}, r"role is \['user'\], expected text"),
        ([{"role": "user", "content": "x"}], r"a message is \[\{'role': 'user'"),
    ],
)
def test_a_role_that_is_no_text_is_named_with_its_line(bring: Any, message: Any, says: str) -> None:
    with pytest.raises(BadRow, match=f"line 2 of .*{says}"):
        bring([PLAIN, {"messages": [message, PLAIN["messages"][1]]}])


def test_tool_calls_of_a_user_drop_the_row(bring: Any) -> None:
    made = bring([PLAIN, {"messages": [{"role": "user", "content": None, "tool_calls": [CALL]}, *TALK[2:]]}])
    assert made.manifest.dropped == {"tool_calls_of_another_role: user": 1}
    assert [row[0][-1] for row in rows_of(made)] == [E]
