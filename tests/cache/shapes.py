"""Small chat templates of our own in the shapes of well-known ones, with the tokens that each needs."""

from typing import Any

QWEN3 = r"""
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- set found = namespace(query=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- if found.open and m.role == 'user' %}
        {%- set found.query = messages | length - 1 - loop.index0 %}{% set found.open = false %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > found.query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = r"""
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) }}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    r"{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    r"{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHANNELS = r"""
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if loop.last and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
            {{- '<|channel|>commentary<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

INSTRUCT = (  # no generation prompt of its own: the answer follows the question's end
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)

FORCED_THINKING = (  # the generation prompt opens a think block, which no answer in a conversation has
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<Bot>{{ m.content.split('</think>')[-1] }}"
    r"{{ eos_token }}{% else %}<User>{{ m.content }}{% endif %}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<Bot><think>\n' }}{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "template": QWEN3,
        "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "words": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "bos": None,
        "eos": "<|im_end|>",
    },
    "llama3": {
        "template": LLAMA3,
        "special": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
    },
    "gemma": {
        "template": GEMMA,
        "special": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "words": ("\n\n",),
        "bos": "<bos>",
        "eos": "<eos>",
    },
    "smollm2": {
        "template": SMOLLM2,
        "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
    },
    "channels": {
        "template": CHANNELS,
        "special": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        "bos": None,
        "eos": "<|return|>",
    },
    "instruct": {
        "template": INSTRUCT,
        "special": ("<s>", "</s>", "[INST]", "[/INST]"),
        "bos": "<s>",
        "eos": "</s>",
    },
    "forced_thinking": {
        "template": FORCED_THINKING,
        "special": ("<s>", "</s>"),
        "words": ("<User>", "<Bot>", "<think>", "</think>"),
        "bos": "<s>",
        "eos": "</s>",
    },
}
