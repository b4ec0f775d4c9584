"""Answers found by the shape of earlier conversations are those that rendering every prefix finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import SHAPES
from test_chat_random import conversations, styles
from toy import C0, PLAIN, chat_tokenizer, rows, supervised_runs, tokenised

from cache.chat import find_answers as answers
from cache.chat.template import BadTemplate


def renders(chat, monkeypatch):
    """Counts the texts that are rendered from here on."""
    counted = []
    render = chat._templates.plain.render
    monkeypatch.setattr(
        chat._templates.plain, "render", lambda *given, **more: counted.append(1) or render(*given, **more)
    )
    return counted


def test_one_render_a_row_once_the_order_of_roles_is_known(tmp_path, monkeypatch):
    chat = chat_tokenizer(tmp_path)
    tokenised(chat, [C0, C0])
    counted = renders(chat, monkeypatch)
    tokenised(chat, [C0] * 50)
    assert len(counted) == 50


def test_rewriting_template_renders_once_an_answer(tmp_path, monkeypatch):
    chat = chat_tokenizer(tmp_path, **SHAPES["qwen3"])
    expected = tokenised(chat, [C0] * 3)
    counted = renders(chat, monkeypatch)
    made = tokenised(chat, [C0] * 50)
    assert len(counted) == 100
    assert rows(made)[:2] == rows(expected)[-2:]
    assert chat.noted["rewritten by the template, so one row an answer"] == 53


@settings(max_examples=60, deadline=None)
@given(style=styles, talks=st.lists(conversations, min_size=2, max_size=4))
def test_shapes_change_nothing(tmp_path_factory, style, talks):
    directory = tmp_path_factory.mktemp("chat")
    literal = chat_tokenizer(directory, style.template)
    literal._finder._shape = lambda order: None
    by_shape = chat_tokenizer(directory, style.template)
    talks = [*talks, *talks, *talks]
    ours, theirs = tokenised(by_shape, talks), tokenised(literal, talks)
    assert rows(ours) == rows(theirs)
    assert ours.row.tolist() == theirs.row.tolist()
    assert ours.dropped == theirs.dropped


def test_prompt_that_depends_on_what_is_said_is_refused(tmp_path, monkeypatch):
    odd = PLAIN.replace("%}[A]{% endif", "%}[A]{{ '!' if messages[-1].content == 'odd' }}{% endif")
    monkeypatch.setattr(answers, "PROVE_EVERY", 1)
    chat = chat_tokenizer(tmp_path, odd)
    tokenised(chat, [C0[:2]] * 3)
    with pytest.raises(BadTemplate, match="writes another generation prompt for what is said"):
        tokenised(chat, [[{"role": "user", "content": "odd"}, C0[1]]])


def test_rows_beside_the_shape_are_proved_on_their_own(tmp_path):
    trims = chat_tokenizer(tmp_path, PLAIN.replace("m.content", "m.content | trim"))
    blank = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ok\n"}]
    assert supervised_runs(trims, tokenised(trims, [C0[:2], C0[:2], C0[:2], blank])) == [["ok[E]"]] * 4
