"""The shapes in which conversations come, and the rules for roles, by the id of the case."""

import json

import pyarrow as pa
import pytest
from toy import (
    C0,
    C0_IDS,
    C0_MASK,
    CALLS,
    PLAIN,
    U,
    calling,
    chat_tokenizer,
    json_batch,
    rows,
    said,
    supervised_runs,
    tokenised,
)

from cache.config import Columns
from cache.errors import BadRow
from cache.source.place import Place


@pytest.mark.parametrize(
    ("roles", "supervised", "dropped", "noted"),
    [
        ("s", [], {"no_answer": 1}, {}),
        ("uua", ["a2[E]"], {}, {}),
        ("aua", ["a2[E]"], {}, {"assistant message that opens a conversation, not supervised": 1}),
        ("uau", ["a1[E]"], {}, {"messages after the last answer, cut": 1}),
        ("uata", ["a1[E]", "a3[E]"], {}, {}),
        ("uaa", ["a1[E]", "a2[E]"], {}, {}),
        ("sa", ["a1[E]"], {}, {}),
        ("a", [], {"no_answer": 1}, {"assistant message that opens a conversation, not supervised": 1}),
    ],
)
def test_role_orders(tmp_path, roles, supervised, dropped, noted):
    chat = chat_tokenizer(tmp_path)
    made = tokenised(chat, [said(roles)])
    assert supervised_runs(chat, made) == ([supervised] if supervised else [])
    assert made.dropped == dropped
    assert chat.noted == noted


def test_what_follows_the_last_answer_is_not_in_the_row(tmp_path):
    chat = chat_tokenizer(tmp_path)
    unanswered = [*C0, {"role": "user", "content": "more"}, {"role": "assistant", "content": " "}]
    made = tokenised(chat, [unanswered], finished=[False])  # what was cut there is not the last answer
    assert rows(made) == [(C0_IDS, C0_MASK)]


def test_unknown_role_and_empty_answers_are_counted(tmp_path):
    chat = chat_tokenizer(tmp_path)
    critic = [
        {"role": "user", "content": "q"},
        {"role": "critic", "content": "c"},
        {"role": "assistant", "content": "a"},
    ]
    silent = [*C0, {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    made = tokenised(chat, [critic, silent])
    assert made.dropped == {"unknown_role: critic": 1}
    assert supervised_runs(chat, made) == [["ok[E]", "no[E]"]]
    assert chat.noted == {"empty answer, not supervised": 1, "messages after the last answer, cut": 2}


def test_template_that_wants_turns_to_alternate_refuses_a_row_not_the_run(tmp_path):
    strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    strict += "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
    made = tokenised(chat_tokenizer(tmp_path, strict), [said("uua"), C0])
    assert made.dropped == {"template_refuses: roles must alternate": 1}
    assert made.row.tolist() == [1]


NAMES = {"user": "human", "assistant": "gpt"}


@pytest.mark.parametrize(
    "conversation",
    [
        C0,
        [{"from": NAMES[m["role"]], "value": m["content"]} for m in C0],
        [{**m, "id": 7, "weight": 1.0, "name": None} for m in C0],
        [{"role": m["role"].title(), "content": m["content"]} for m in C0],
    ],
)
def test_schema_variants_give_the_same_rows(tmp_path, conversation):
    chat = chat_tokenizer(tmp_path)
    expected = [(C0_IDS, C0_MASK)]
    assert rows(tokenised(chat, [conversation])) == expected
    arrow = pa.table({"conversations": [conversation]})
    assert rows(chat.tokenise(arrow, Columns(), Place("chat.arrow", 0))) == expected


def test_prompt_and_completion(tmp_path):
    chat = chat_tokenizer(tmp_path)
    text = pa.table({"prompt": ["hi"], "completion": ["ok"]})
    messages = pa.table({"prompt": [C0[:3]], "completion": [C0[3:]]})
    assert rows(chat.tokenise(text, Columns(), Place("pairs", 0)))[0][0] == C0_IDS[:8]
    assert rows(chat.tokenise(messages, Columns(), Place("pairs", 0))) == [(C0_IDS, C0_MASK)]
    prompts, completions = [json.dumps("hi"), json.dumps(C0[:3]), None], ['"ok"', json.dumps(C0[3:]), '""']
    lines = pa.table({"prompt": prompts, "completion": completions})
    made = chat.tokenise(lines, Columns(), Place("pairs.jsonl", 0, lines=True))
    assert [ids for ids, _ in rows(made)] == [C0_IDS[:8], C0_IDS]
    assert made.dropped == {"empty": 1}


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (
            [{"speaker": "me", "text": "hi"}],
            r"row 18 of chat.jsonl: a message has the keys speaker, text; expected role",
        ),
        ([{"role": "user"}], r"row 18 of chat.jsonl: a message has the keys role;"),
        ([{"role": 3, "content": "x"}], "row 18 of chat.jsonl: role is 3, expected text"),
        ([{"role": "user", "content": 5}], "row 18 of chat.jsonl: content is 5"),
        (["hi"], "row 18 of chat.jsonl: a message is 'hi'"),
        ({"role": "user"}, "row 18 of chat.jsonl: a conversation is a dict"),
        ("{", "row 18 of chat.jsonl: the conversation is not JSON"),
    ],
)
def test_unknown_shapes_name_file_and_row(tmp_path, conversation, message):
    with pytest.raises(BadRow, match=message):
        chat_tokenizer(tmp_path).tokenise(json_batch([C0, conversation]), Columns(), Place("chat.jsonl", 17))


def test_lines_are_counted_from_one(tmp_path):
    batch = json_batch([C0, [{"speaker": "me"}]])
    with pytest.raises(BadRow, match=r"line 19 of chat\.jsonl"):
        chat_tokenizer(tmp_path).tokenise(batch, Columns(), Place("chat.jsonl", 17, lines=True))


def test_no_column_of_conversations_names_what_there_is(tmp_path):
    with pytest.raises(BadRow, match=r"has the columns text; expected .*messages"):
        chat_tokenizer(tmp_path).tokenise(pa.table({"text": ["x"]}), Columns(), Place("chat.arrow", 0))


@pytest.mark.parametrize("call", [{}, {"id": ""}, {"id": None, "type": None}, {"type": "function"}])
def test_tool_call_without_id_or_type_is_filled(tmp_path, call):
    chat = chat_tokenizer(tmp_path, CALLS)
    assert supervised_runs(chat, tokenised(chat, [calling(**call)])) == [['<call00000 function f {"a": 1}>[E]']]


def test_ids_are_counted_through_a_conversation(tmp_path):
    chat = chat_tokenizer(tmp_path, CALLS)
    two = [*calling(), {"role": "tool", "content": "r"}, *calling()[1:]]
    runs = supervised_runs(chat, tokenised(chat, [two]))
    assert runs == [['<call00000 function f {"a": 1}>[E]', '<call00001 function f {"a": 1}>[E]']]


@pytest.mark.parametrize("call", [{"id": 123}, {"type": "code"}, {"function": {"arguments": {}}}, {"function": "f"}])
def test_tool_call_of_wrong_type_is_an_error(tmp_path, call):
    with pytest.raises(BadRow, match=r"row 0 of chat\.jsonl"):
        tokenised(chat_tokenizer(tmp_path, CALLS), [calling(**call)])


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', '{"a":1}'])
def test_arguments_are_encoded_once(tmp_path, arguments):
    chat = chat_tokenizer(tmp_path, CALLS)
    made = tokenised(chat, [calling(function={"name": "f", "arguments": arguments})])
    assert supervised_runs(chat, made) == [['<call00000 function f {"a": 1}>[E]']]
    assert b'\\"' not in bytes(i for i in made.tokens.values.tolist() if i < 256)


@pytest.mark.parametrize("arguments", ["{a: 1}", "", "[1]", '"x"', [1]])
def test_arguments_that_are_no_json_object_refuse_the_row(tmp_path, arguments):
    made = tokenised(chat_tokenizer(tmp_path, CALLS), [calling(function={"name": "f", "arguments": arguments}), C0])
    assert made.dropped == {"tool_arguments_not_json": 1}
    assert made.row.tolist() == [1]


def test_function_call_role_of_the_from_value_shape(tmp_path):
    chat = chat_tokenizer(tmp_path, CALLS)
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    made = tokenised(chat, [[{"from": "human", "value": "q"}, call, {"from": "observation", "value": "r"}, *C0[1:2]]])
    assert supervised_runs(chat, made) == [['<call00000 function f {"a": 1}>[E]', "ok[E]"]]


def test_content_as_parts(tmp_path):
    chat = chat_tokenizer(tmp_path)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, *C0[1:]]
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "q"}]}, *C0[1:]]
    made = tokenised(chat, [parts, image])
    assert rows(made) == [(C0_IDS, C0_MASK)]
    assert made.dropped == {"part_not_text: image": 1}


def test_half_of_a_surrogate_pair(tmp_path):
    chat = chat_tokenizer(tmp_path)
    half = r'[{"role": "user", "content": "\ud83d x"}, {"role": "assistant", "content": "ok"}]'
    pair = r'[{"role": "user", "content": "\ud83d\ude00"}, {"role": "assistant", "content": "ok"}]'
    made = tokenised(chat, [half, pair, C0])
    ids = [row for row, _ in rows(made)]
    assert ids[0][:6] == [U, *"\ufffd x".encode()]
    assert ids[1][:5] == [U, *"\U0001f600".encode()]
    assert ids[2] == C0_IDS
    assert chat.noted == {"half of a surrogate pair, replaced by U+FFFD": 1}


@pytest.mark.parametrize("kind", ["json", "arrow"])
def test_arguments_keep_their_own_keys(tmp_path, kind):
    conversations = [calling(function={"name": "f", "arguments": given}) for given in ({"a": 1}, {"b": "x"})]
    batch = json_batch(conversations) if kind == "json" else pa.table({"messages": conversations})
    chat = chat_tokenizer(tmp_path, CALLS)
    runs = supervised_runs(chat, chat.tokenise(batch, Columns(), Place("x", 0)))
    assert runs == [['<call00000 function f {"a": 1}>[E]'], ['<call00000 function f {"b": "x"}>[E]']]


def test_content_as_text_and_as_parts_in_one_file(tmp_path):
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in C0]
    assert rows(tokenised(chat_tokenizer(tmp_path), [C0, parts])) == [(C0_IDS, C0_MASK)] * 2


def test_empty_conversations_are_counted_and_rows_keep_their_numbers(tmp_path):
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    made = tokenised(chat_tokenizer(tmp_path), [[], None, empty, C0])
    assert made.dropped == {"empty": 3}
    assert made.row.tolist() == [3]
    nothing = tokenised(chat_tokenizer(tmp_path), [[]])
    assert (nothing.tokens.num_rows, nothing.split_text) == (0, [])


def test_arrow_lists_honour_slices_and_nulls(tmp_path):
    chat = chat_tokenizer(tmp_path)
    batch = pa.table({"messages": [said("ua"), None, C0, said("ua")], "finished": [True, True, False, True]})
    made = chat.tokenise(batch.slice(1, 2), Columns(), Place("x", 1))
    assert rows(made) == [(C0_IDS[:15], C0_MASK[:15])]
    assert made.row.tolist() == [1]
    assert made.dropped == {"empty": 1}


def test_template_that_fails_on_a_row_spares_the_others(tmp_path):
    template = "{% if messages[0].content == 'zero' %}{{ 1 // 0 }}{% endif %}" + PLAIN
    made = tokenised(chat_tokenizer(tmp_path, template), [[{"role": "user", "content": "zero"}, C0[1]], C0])
    assert made.dropped == {"template_refuses: integer division or modulo by zero": 1}
    assert rows(made) == [(C0_IDS, C0_MASK)]


def test_tools_reach_the_template(tmp_path):
    chat = chat_tokenizer(tmp_path, "{{ tools | tojson if tools }}" + PLAIN)
    tools = json.dumps([{"name": "f"}])
    made = tokenised(chat, [C0, C0], tools=pa.array([tools, None], pa.string()))
    assert [row[: -len(C0_IDS)] for row, _ in rows(made)] == [[*b'[{"name": "f"}]'], []]
