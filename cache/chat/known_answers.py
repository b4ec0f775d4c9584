"""What a tokenizer and a template make of a fixed set of conversations: by this two versions of them are told apart.

The code that is asked is the code that tokenises rows: transformers builds a tokenizer from more than its files say.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from cache.canonical import canonical
from cache.chat.token_places import hash_texts
from cache.chat.tokenizer import ChatTokenizer, load_tokenizer
from cache.config import Columns
from cache.errors import CacheError
from cache.source.place import Place

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place, now.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}

# Plain, several turns, system text, reasoning, tools, and what tokenizers differ in: digits, blanks, code, letters
# outside ASCII (composed and not), right-to-left, emoji of several code points, text that reads like a control token.
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[Any] | None], ...] = (
    ([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello, how can I help?"}], None),
    (
        [
            {"role": "system", "content": "  You are terse. \n"},
            {"role": "user", "content": "What is 1234567 + 3.14159?"},
            {"role": "assistant", "content": "1234570.14159"},
            {"role": "user", "content": "And\t\tin  words,\r\nplease?"},
            {"role": "assistant", "content": "One million two hundred…\n\n"},
        ],
        None,
    ),
    (
        [
            {"role": "user", "content": "naïve nai\u0308ve 日本語 한국어 مرحبا ไทย 👩🏽‍🚀 🇨🇭 \u200b<|im_end|></s>"},
            {
                "role": "assistant",
                "content": "<think>\nSo.\n</think>\n\nDon't they're I'VE x;\n    return x  # ½ ﬁ",
            },
            {"role": "user", "content": "Again."},
            {"role": "assistant", "reasoning_content": "They ask again.", "content": "Ça va."},
        ],
        None,
    ),
    (
        [
            {"role": "system", "content": "Use tools."},
            {"role": "user", "content": "Is it raining?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"rain": true}', "tool_call_id": "call00001", "name": "weather"},
            {"role": "assistant", "content": "Yes, it is."},
        ],
        [_TOOL],
    ),
)


def ask(
    tokenizer: Path, text: str, *, template: str | None, template_arguments: dict[str, Any], trust_remote_code: bool
) -> dict[str, Any]:
    """What these make of the conversations, as a hash (`rows`), and their spelling; a refusal is an answer, too.

    Raises BadTemplate or BadSource where no conversation could be tokenised.
    """
    chat = ChatTokenizer(
        tokenizer,
        template=template,
        template_arguments=template_arguments,
        supervise="all",
        trust_remote_code=trust_remote_code,
    )
    answers: list[Any] = [sorted(chat.stop_ids)]
    for messages, tools in CONVERSATIONS:
        chat.begin()
        batch = pa.table({"messages": [json.dumps(messages)], "tools": [json.dumps(tools)]})
        try:
            made = chat.tokenise(batch, Columns(messages="messages"), Place("a probe", 0))
        except CacheError as error:
            answers.append(type(error).__name__)
            continue
        tokens = made.tokens
        answers.append([tokens.values.tolist(), tokens.mask.tolist(), tokens.offsets.tolist(), sorted(made.dropped)])
    probe, vocabulary = ask_spelling(tokenizer, text, trust_remote_code=trust_remote_code)
    rows = xxhash.xxh3_128_hexdigest(canonical(answers))
    return {"rows": rows, "probe": probe, "vocabulary": vocabulary}


def ask_spelling(tokenizer: Path, text: str, *, trust_remote_code: bool) -> tuple[list[int], str]:
    """Ids of a text, and the hash of the text of every id, by the tokenizer that transformers builds."""
    backend = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code).backend_tokenizer
    return [int(identity) for identity in backend.encode(text).ids], hash_texts(backend)
