"""Tokenizers with several templates, and what a template does not write of a row."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy import C0, MARKED, PLAIN, chat_tokenizer, rows, save_tokenizer, supervised_runs, tokenised

from cache.chat.template import BadTemplate
from cache.config import RowsConfig
from cache.key.content import content_key
from flows.runs.parameters import resolve_rows

CALLS = (
    "{% for tool in tools %}[U]{{ tool | tojson }}[E]{% endfor %}{% for m in messages %}"
    "{{ '[A]' if m.role == 'assistant' else '[U]' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}])
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"port": "Brest"}}}
TALK = [
    {"role": "user", "content": "How high?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4 m"},
    {"role": "assistant", "content": "4 metres."},
]
NAMED: Any = {"default": PLAIN, "tool_use": CALLS, "rag": MARKED}


def texts(chat: Any, made: Any) -> list[str]:
    return [chat._tokenizer.decode(ids) for ids, _ in rows(made)]


def test_rows_with_tools_have_the_template_that_serving_chooses(tmp_path: Path) -> None:
    chat = chat_tokenizer(tmp_path, NAMED)
    made = tokenised(chat, [C0, TALK], tools=[None, TOOLS])
    served = [
        chat._tokenizer.apply_chat_template(C0, tokenize=False),
        chat._tokenizer.apply_chat_template(TALK, tools=json.loads(TOOLS), tokenize=False),
    ]
    assert texts(chat, made) == served
    assert '"tide"' in served[1]
    assert '"tide"' not in served[0]
    assert supervised_runs(chat, made) == [["ok[E]", "no[E]"], ["<tide>[E]", "4 metres.[E]"]]
    assert not chat.noted


def test_each_template_is_compared_with_serving(tmp_path: Path) -> None:
    chat = chat_tokenizer(tmp_path, NAMED)
    chat._templates = type(chat._templates)(chat._templates.plain, chat._templates.plain)  # as if all rows had one
    chat.begin()
    with pytest.raises(Exception, match="apply_chat_template gives"):
        tokenised(chat, [[TALK[0], TALK[3]]], tools=[TOOLS])


def test_a_template_of_the_tokenizer_may_be_named(tmp_path: Path) -> None:
    without_default = {"rag": MARKED, "tool_use": CALLS.replace("in tools ", "in tools or [] ")}
    with pytest.raises(BadTemplate, match=r"none that is the default.*rows.template"):
        chat_tokenizer(tmp_path, without_default)
    with pytest.raises(BadTemplate, match=r"no chat template of that name, expected one of .*rag"):
        chat_tokenizer(tmp_path, without_default, template_file="default")
    chat = chat_tokenizer(tmp_path, without_default, template_file="tool_use")
    assert supervised_runs(chat, tokenised(chat, [C0])) == [["ok[E]", "no[E]"]]


def test_a_named_template_is_no_path_and_is_in_the_key(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", NAMED)
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": C0}) + "\n")
    keys = set()
    for template in (None, "rag", "default"):
        config = resolve_rows(RowsConfig(source=str(source), template=template), tmp_path)
        assert config.template == template
        keys.add(content_key(config, tokenizer, home=tmp_path).hex)
    extra = tokenizer / "additional_chat_templates" / "tool_use.jinja"
    assert extra.is_file()
    extra.write_text(extra.read_text().replace("<", "("))
    keys.add(content_key(RowsConfig(source=str(source)), tokenizer, home=tmp_path).hex)
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("template", "noted"),
    [
        (CALLS.replace("[U]{{ tool | tojson }}[E]", ""), {"tools that the template leaves out": 1}),
        (MARKED, {"tools that the template leaves out": 1, "tool call that the template leaves out": 1}),
        (CALLS, {}),
    ],
)
def test_tools_that_a_template_leaves_out_are_noted(tmp_path: Path, template: str, noted: dict[str, int]) -> None:
    chat = chat_tokenizer(
        tmp_path, template.replace("in tools ", "in tools or [] ").replace("m.content }", "m.content or '' }")
    )
    tokenised(chat, [TALK], tools=[TOOLS])
    assert dict(chat.noted) == noted


def test_system_text_that_a_template_leaves_out_is_noted(tmp_path: Path) -> None:
    skips = PLAIN.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' or loop.index0 == 0 %}"
    )
    late = [*C0[:2], {"role": "system", "content": "Be brief."}, *C0[2:]]
    chat = chat_tokenizer(tmp_path / "a", skips.replace("loop.index0 == 0", "m == messages[0]"))
    for _ in range(3):
        made = tokenised(chat, [late, [late[2], *C0]])
    assert chat.noted == {"system text that the template leaves out": 3}
    assert "brief" not in texts(chat, made)[0]
    written = chat_tokenizer(tmp_path / "b")
    assert "Be brief." in texts(written, tokenised(written, [late]))[0]
    assert not written.noted


@pytest.mark.parametrize("always", [True, False])
def test_what_the_prompt_supplies_is_not_supervised_where_marks_enclose_it(tmp_path: Path, always: bool) -> None:
    think = "<t></t>" if always else "{% if loop.last %}<t></t>{% endif %}"
    template = MARKED.replace("{% generation %}", "{% generation %}" + think).replace(
        "%}[A]{% endif", "%}[A]<t></t>{% endif"
    )
    chat = chat_tokenizer(tmp_path, template)
    made = tokenised(chat, [C0, [C0[0], {"role": "assistant", "content": "<t>x</t>y"}]])
    assert supervised_runs(chat, made) == [["ok[E]", "no[E]"], ["<t>x</t>y[E]"]]
