"""Conversations → ids and mask on the toy tokenizer, by the id of the case: what is supervised, and which ids."""

import numpy as np
import pyarrow as pa
import pytest
from toy import (
    BOS,
    C0,
    C0_IDS,
    C0_MASK,
    EOS,
    MARKED,
    PLAIN,
    A,
    E,
    U,
    chat_tokenizer,
    json_batch,
    rows,
    supervised_runs,
    tokenised,
)

from cache.chat.supervise import AnswerSpans, supervise
from cache.chat.template import BadTemplate
from cache.chat.token_places import Encoded
from cache.config import Columns
from cache.source.place import Place

STOPS = np.isin(np.arange(263), [E, EOS])


def encoded(ids: list[int], text_sizes: list[int]) -> Encoded:
    """Tokens of one row, with the bytes that each covers."""
    end = np.cumsum(text_sizes)
    return Encoded(
        np.array(ids, np.uint32), np.array([0, len(ids)]), end - text_sizes, end, np.array([0, int(end[-1])])
    )


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_mask_of_c0_and_of_every_prefix(tmp_path, template):
    ((ids, mask),) = rows(tokenised(chat_tokenizer(tmp_path, template), [C0]))
    assert ids == C0_IDS
    assert mask == C0_MASK
    assert [sum(mask[:length]) for length in range(1, 17)] == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5, 6]
    assert (mask[4], mask[12]) == (0, 0)  # the headers


def test_span_that_ends_at_the_first_token():
    ids = encoded([ord("A"), U, ord("b"), ord("c")], [1, 3, 1, 1])
    one = np.array([0])
    found = supervise(ids, AnswerSpans(one, one, one + 1, np.array([True])), STOPS)
    assert found.mask.tolist() == [1, 0, 0, 0]


def test_mask_of_an_answer_without_end_of_turn_stops_before_the_next():
    ids = encoded([A, *b"xy", A, *b"z", E], [3, 1, 1, 3, 1, 3])
    both = AnswerSpans(np.array([0, 0]), np.array([3, 8]), np.array([5, 9]), np.array([False, False]))
    found = supervise(ids, both, STOPS)
    assert found.mask.tolist() == [0, 1, 1, 0, 1, 1]
    assert not found.without_end.size
    never = supervise(ids, AnswerSpans(both.row, both.start, both.end, both.unfinished), STOPS & False)
    assert never.without_end.tolist() == [1]


def test_mask_of_an_unfinished_answer_ends_before_a_stop_inside_its_span():
    ids = encoded([A, *b"xy", E, 10], [3, 1, 1, 3, 1])
    found = supervise(ids, AnswerSpans(*map(np.array, ([0], [3], [9], [True]))), STOPS)
    assert found.mask.tolist() == [0, 1, 1, 0, 0]
    assert found.keep.tolist() == [True] * 3 + [False] * 2


@pytest.mark.parametrize("filter_", ["", " | trim"])
def test_answer_that_ends_in_a_blank(tmp_path, filter_):
    chat = chat_tokenizer(tmp_path, PLAIN.replace("m.content", f"m.content{filter_}"))
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok "}]
    assert supervised_runs(chat, tokenised(chat, [conversation])) == [["ok[E]" if filter_ else "ok [E]"]]


def test_template_without_marks_still_gives_a_mask(tmp_path):
    made = tokenised(chat_tokenizer(tmp_path, PLAIN), [C0])
    assert int(made.tokens.mask.sum()) == 6


def test_template_that_never_ends_a_turn_is_refused(tmp_path):
    with pytest.raises(BadTemplate, match="no end of turn"):
        chat_tokenizer(tmp_path, PLAIN.replace("[E]", "\n"))


def test_default_system_text_and_separators_are_in_the_ids(tmp_path):
    template = (
        "{% if messages[0].role != 'system' %}[S]x[E]\n{% endif %}"
        "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[U]' }}{{ m.content }}[E]\n{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    chat = chat_tokenizer(tmp_path, template)
    made = tokenised(chat, [C0])
    ((ids, _),) = rows(made)
    assert ids == chat._tokenizer.apply_chat_template(C0, tokenize=True, return_dict=False)
    # [S] is no token of the tokenizer: three bytes. The newline after an end of turn is nobody's answer.
    assert ids == [*b"[S]x", E, 10, U, *b"hi", E, 10, A, *b"ok", E, 10, U, *b"go", E, 10, A, *b"no", E, 10]
    assert supervised_runs(chat, made) == [["ok[E]", "no[E]"]]


def test_template_over_many_lines_is_read_as_serving_reads_it(tmp_path):
    template = """{% for m in messages %}
    {% if m.role == 'stop' %}{% break %}{% endif %}
    {% if m.role == 'assistant' %}
[A]{{ m.content }}[E]
    {% else %}
[U]{{ m.content }}[E]
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
[A]
{%- endif %}"""
    chat = chat_tokenizer(tmp_path, template)
    made = tokenised(chat, [C0])
    ids = [U, *b"hi", E, 10, A, *b"ok", E, 10, U, *b"go", E, 10, A, *b"no", E, 10]
    assert rows(made)[0][0] == ids == chat._tokenizer.apply_chat_template(C0, tokenize=True, return_dict=False)
    assert supervised_runs(chat, made) == [["ok[E]", "no[E]"]]


def test_ids_other_than_serving_sees_are_refused(tmp_path):
    chat = chat_tokenizer(tmp_path)
    chat._tokenizer.chat_template = PLAIN.replace("[E]", "[EOS]")  # what serving would render
    with pytest.raises(Exception, match=r"token 3 is \[261.*gives \[257"):
        tokenised(chat, [C0])


def test_turn_end_that_is_not_the_end_of_sequence(tmp_path):
    ((ids, mask),) = rows(tokenised(chat_tokenizer(tmp_path), [C0]))
    assert [ids[i] for i in (7, 15)] == [E, E]
    assert [mask[i] for i in (7, 15)] == [1, 1]


def test_tokens_that_depend_on_what_stands_before(tmp_path):
    # The header ends in a newline and the answer begins with one: they merge into a token that is neither's.
    template = PLAIN.replace("'[A]'", "'[A]\n'").replace("%}[A]{%", "%}[A]\n{%")
    chat = chat_tokenizer(tmp_path, template, merges=((b"\n", b"\n"),))
    made = tokenised(chat, [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "\nHi"}]])
    ((ids, mask),) = rows(made)
    assert ids == [U, ord("q"), E, A, 263, *b"Hi", E]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1]  # the straddling token is not supervised


@pytest.mark.parametrize(
    ("change", "of"), [("upper", "m.content | upper"), ("escape", "m.content | escape"), ("reverse", "m.content[::-1]")]
)
def test_template_that_changes_text_is_refused_by_name(tmp_path, change, of):
    file = tmp_path / f"{change}.jinja"
    file.write_text(PLAIN.replace("m.content", of))
    with pytest.raises(BadTemplate, match=f"{change}.jinja changes what people say"):
        chat_tokenizer(tmp_path, template_file=str(file))


THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A]"
    "{{ m.content if loop.last else m.content.split('</t>')[-1] }}[E]"
    "{% else %}[U]{{ m.content }}[E]{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


REWRITTEN = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "<t>x</t>y"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "<t>z</t>w"},
]


def test_rewritten_history_gives_a_row_an_answer(tmp_path):
    chat = chat_tokenizer(tmp_path, THINKING)
    made = tokenised(chat, [REWRITTEN, C0])
    first, second, third = rows(made)
    assert first == ([U, *b"q", E, A, *b"<t>x</t>y", E], [0] * 4 + [1] * 10)
    assert second == ([U, *b"q", E, A, *b"y", E, U, *b"r", E, A, *b"<t>z</t>w", E], [0] * 10 + [1] * 10)
    assert third == (C0_IDS, C0_MASK)
    assert made.row.tolist() == [0, 0, 1]
    assert made.split_text == ["q", "q", "hi"]
    assert chat.noted == {"rewritten by the template, so one row an answer": 1}


def test_last_answer_alone_is_one_row(tmp_path):
    chat = chat_tokenizer(tmp_path, THINKING, supervise="last")
    assert supervised_runs(chat, tokenised(chat, [REWRITTEN])) == [["<t>z</t>w[E]"]]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_last_answer_only_on_every_path(tmp_path, template, kind):
    chat = chat_tokenizer(tmp_path, template, supervise="last")
    batch = json_batch([C0]) if kind == "json" else pa.table({"messages": [C0]})
    ((ids, mask),) = rows(chat.tokenise(batch, Columns(), Place("x", 0)))
    assert ids == C0_IDS
    assert np.flatnonzero(mask).tolist() == [13, 14, 15]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_unfinished_answer_ends_with_its_last_token(tmp_path, template):
    chat = chat_tokenizer(tmp_path, template)
    made = tokenised(chat, [C0, C0, C0], finished=[True, False, None])
    whole, cut, unknown = rows(made)
    assert whole == unknown == (C0_IDS, C0_MASK)
    assert cut == (C0_IDS[:15], C0_MASK[:15])


def test_unfinished_answer_of_a_rewritten_conversation(tmp_path):
    chat = chat_tokenizer(tmp_path, THINKING)
    made = tokenised(chat, [REWRITTEN], finished=[False])
    assert supervised_runs(chat, made) == [["<t>x</t>y[E]"], ["<t>z</t>w"]]
    assert rows(made)[1][0][-1] == ord("w")


def test_unfinished_with_a_token_that_reaches_into_the_end_of_turn(tmp_path):
    # The template writes a newline before the end of turn; with the answer's own it makes one token.
    template = PLAIN.replace("{{ m.content }}[E]", "{{ m.content }}\n[E]")
    chat = chat_tokenizer(tmp_path, template, merges=((b"\n", b"\n"),))
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y\n"}]
    whole, cut = rows(tokenised(chat, [conversation, conversation], finished=[True, False]))
    assert whole == ([U, *b"q\n", E, A, *b"y", 263, E], [0] * 5 + [1] * 3)
    assert cut == ([U, *b"q\n", E, A, *b"y"], [0] * 5 + [1])


def test_rows_of_text_outside_ascii(tmp_path):
    chat = chat_tokenizer(tmp_path)
    talk = [{"role": "user", "content": "é😀"}, {"role": "assistant", "content": "日本 ok"}]
    assert supervised_runs(chat, tokenised(chat, [talk, C0])) == [["日本 ok[E]"], ["ok[E]", "no[E]"]]


def test_bos_of_template_and_tokenizer_is_one(tmp_path):
    chat = chat_tokenizer(tmp_path, "{{ bos_token }}" + PLAIN, adds_bos=True)
    ((ids, mask),) = rows(tokenised(chat, [C0]))
    assert ids == [BOS, *C0_IDS]
    assert mask == [0, *C0_MASK]


def test_end_of_sequence_only_where_the_template_writes_it(tmp_path):
    at_the_end = PLAIN.replace(
        "{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    for name, template, count in (("none", PLAIN, 0), ("end", at_the_end, 1)):
        chat = chat_tokenizer(tmp_path / name, template)
        ((ids, mask),) = rows(tokenised(chat, [C0]))
        assert ids == C0_IDS + [EOS] * count
        assert mask == C0_MASK + [0] * count


def test_padding_that_is_the_end_of_turn_changes_no_mask(tmp_path):
    chat = chat_tokenizer(tmp_path, PLAIN.replace("[E]", "[EOS]"), eos="[EOS]")
    chat._tokenizer.pad_token = "[EOS]"
    ((ids, mask),) = rows(tokenised(chat, [C0]))
    assert [i for i, token in enumerate(ids) if token == EOS and mask[i]] == [7, 15]
    assert mask == C0_MASK
