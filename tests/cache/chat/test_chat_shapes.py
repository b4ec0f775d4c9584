"""Templates in the shapes of Qwen3, Llama 3, Gemma, SmolLM2, and of gpt-oss with its channels."""

import json

import pytest
from shapes import SHAPES
from toy import C0, chat_tokenizer, rows, supervised_runs, tokenised

from cache.chat.template import BadTemplate


def shaped(directory, name, **options):
    return chat_tokenizer(directory, **SHAPES[name], **options)


def asked(*answers, **last):
    """Questions q0, q1, … with these answers; the last one with more fields."""
    talk = [
        message
        for i, answer in enumerate(answers)
        for message in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": answer})
    ]
    talk[-1] |= last
    return talk


def text_of(chat, made, row=0):
    return chat._tokenizer.decode(rows(made)[row][0], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "end", "arguments"),
    [
        ("llama3", "<|eot_id|>", {"date_string": "26 Jul 2024"}),
        ("gemma", "<end_of_turn>", {}),
        ("smollm2", "<|im_end|>", {}),
    ],
)
def test_plain_shapes_are_one_row_with_every_answer(tmp_path, name, end, arguments):
    chat = shaped(tmp_path, name, template_arguments=arguments)
    made = tokenised(chat, [C0])
    assert supervised_runs(chat, made) == [[f"ok{end}", f"no{end}"]]
    assert rows(made)[0][0] == chat._tokenizer.apply_chat_template(C0, tokenize=True, return_dict=False, **arguments)


def test_smollm2_default_system_text_is_in_the_ids_and_not_supervised(tmp_path):
    chat = shaped(tmp_path, "smollm2")
    made = tokenised(chat, [C0[:2]])
    assert text_of(chat, made).startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nhi")
    assert supervised_runs(chat, made) == [["ok<|im_end|>"]]


def test_llama3_trims_and_ends_turns_with_another_token_than_its_end_of_sequence(tmp_path):
    chat = shaped(tmp_path, "llama3", template_arguments={"date_string": "26 Jul 2024"})
    assert chat.stop_ids == (257, 260)
    assert supervised_runs(chat, tokenised(chat, [asked(" ok\n")])) == [["ok<|eot_id|>"]]


def test_llama3_day_of_today_is_refused_and_a_fixed_day_is_taken(tmp_path):
    with pytest.raises(BadTemplate, match="writes the day of today into every row"):
        shaped(tmp_path, "llama3")
    chat = shaped(tmp_path, "llama3", template_arguments={"strftime_now": "2024-07-26"})
    assert "Today: 26 Jul 2024" in text_of(chat, tokenised(chat, [C0]))  # and serving is asked with the same day


def test_gemma_refuses_a_system_text_and_other_orders_a_row_at_a_time(tmp_path):
    chat = shaped(tmp_path, "gemma")
    system = [{"role": "system", "content": "s"}, *C0]
    made = tokenised(chat, [system, [C0[0], *C0], C0])
    assert made.dropped == {
        "template_refuses: System role not supported": 1,
        "template_refuses: Roles must alternate": 1,
    }
    assert made.row.tolist() == [2]


def test_qwen3_without_reasoning_does_not_supervise_the_empty_think_block(tmp_path):
    chat = shaped(tmp_path, "qwen3")
    made = tokenised(chat, [asked("y")])
    assert text_of(chat, made).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\ny<|im_end|>\n")
    assert supervised_runs(chat, made) == [["y<|im_end|>"]]


def test_qwen3_without_thinking_has_the_empty_think_block_in_its_prompt(tmp_path):
    chat = shaped(tmp_path, "qwen3", template_arguments={"enable_thinking": False})
    made = tokenised(chat, [asked("x", "y"), asked("<think>\n\n</think>\n\ny")])
    # An earlier answer is written without the block that its prompt had: a row an answer.
    assert supervised_runs(chat, made) == [["x<|im_end|>"], ["y<|im_end|>"], ["y<|im_end|>"]]
    assert text_of(chat, made, 1).count("<think>") == 1


@pytest.mark.parametrize(
    "answer",
    [{"reasoning_content": "z"}, {"reasoning": "z"}, {"thinking": "z"}, {"content": "<think>\nz\n</think>\n\ny"}],
)
def test_qwen3_reasoning_is_supervised_with_its_marks(tmp_path, answer):
    chat = shaped(tmp_path, "qwen3")
    made = tokenised(chat, [asked("x", "y", **answer)])
    assert supervised_runs(chat, made) == [["x<|im_end|>"], ["<think>\nz\n</think>\n\ny<|im_end|>"]]
    assert made.row.tolist() == [0, 0]


def test_qwen3_other_blanks_around_reasoning_are_written_as_the_template_has_them(tmp_path):
    chat = shaped(tmp_path, "qwen3")
    made = tokenised(chat, [asked("<think>z</think>y")])
    assert supervised_runs(chat, made) == [["<think>\nz\n</think>\n\ny<|im_end|>"]]


def test_qwen3_tool_calls_and_their_results(tmp_path):
    chat = shaped(tmp_path, "qwen3")
    call = {"name": "f", "arguments": '{"a": 1}'}
    talk = [
        *asked("", reasoning_content="need f", tool_calls=[call]),
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "seven", "reasoning_content": "so"},
    ]
    made = tokenised(chat, [talk], tools=[json.dumps([{"name": "f"}])])
    assert supervised_runs(chat, made) == [
        [
            '<think>\nneed f\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            "<think>\nso\n</think>\n\nseven<|im_end|>",
        ]
    ]
    assert "<tool_response>\n7\n</tool_response>" in text_of(chat, made)


def test_qwen3_tool_call_without_reasoning_does_not_supervise_the_empty_think_block(tmp_path):
    chat = shaped(tmp_path, "qwen3")
    made = tokenised(chat, [asked("", tool_calls=[{"name": "f", "arguments": {}}])])
    assert supervised_runs(chat, made) == [['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>']]


def test_qwen3_unfinished_reasoned_answer_is_cut(tmp_path):
    chat = shaped(tmp_path, "qwen3")
    made = tokenised(chat, [asked("y", reasoning_content="z"), asked("y")], finished=[False, False])
    assert supervised_runs(chat, made) == [["<think>\nz\n</think>\n\ny"], ["y"]]
    assert [text_of(chat, made, row)[-1] for row in (0, 1)] == ["y", "y"]


def test_smollm2_leaves_reasoning_out_and_that_is_counted(tmp_path):
    chat = shaped(tmp_path, "smollm2")
    made = tokenised(chat, [asked("y", reasoning_content="z")])
    assert supervised_runs(chat, made) == [["y<|im_end|>"]]
    assert chat.noted == {"reasoning that the template leaves out": 1}


def channels(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [260, 261, 70000]}')
    return shaped(directory, "channels", template_arguments={"strftime_now": "2025-06-01"})


def test_channels_headers_are_supplied_and_earlier_ends_of_turn_are_rewritten(tmp_path):
    chat = channels(tmp_path)
    assert chat.stop_ids == (260, 261)
    made = tokenised(chat, [asked("x", "y")])
    assert supervised_runs(chat, made) == [["x<|return|>"], ["y<|return|>"]]
    assert "final<|message|>x<|end|>" in text_of(chat, made, 1)


def test_channels_reasoning_is_what_the_target_writes_after_its_prompt(tmp_path):
    chat = channels(tmp_path)
    made = tokenised(chat, [asked("y", thinking="z")])
    assert supervised_runs(chat, made) == [
        ["<|channel|>analysis<|message|>z<|end|><|start|>assistant<|channel|>final<|message|>y<|return|>"]
    ]


def test_channels_tool_call_ends_with_its_own_stop(tmp_path):
    chat = channels(tmp_path)
    talk = [
        *asked("", tool_calls=[{"name": "f", "arguments": {"a": 1}}]),
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "y"},
    ]
    made = tokenised(chat, [talk])
    call = ' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|>'
    assert supervised_runs(chat, made) == [[call, "y<|return|>"]]


def test_instruct_answer_follows_its_question_with_a_blank(tmp_path):
    chat = shaped(tmp_path, "instruct")
    assert supervised_runs(chat, tokenised(chat, [C0] * 3)) == [[" ok</s>", " no</s>"]] * 3


def test_prompt_that_no_answer_follows_in_the_text_is_refused(tmp_path):
    with pytest.raises(BadTemplate, match="answer_not_after_prompt"):
        shaped(tmp_path, "forced_thinking")


def test_no_template_at_all(tmp_path):
    with pytest.raises(BadTemplate, match="has no chat template"):
        chat_tokenizer(tmp_path, None)


def test_broken_template_names_file_and_line(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    with pytest.raises(BadTemplate, match=r"mine.jinja: not a Jinja template, line 2"):
        chat_tokenizer(tmp_path / "tokenizer", template_file=str(file))
