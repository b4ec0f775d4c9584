"""The toy tokenizer and templates of the cases: bytes without merges, and seven special tokens.

Ids 0..255 are bytes, then BOS 256, EOS 257, PAD 258, [U] 259, [A] 260, [E] 261 (end of turn), [MASK] 262.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from cache.chat.tokenizer import ChatTokenizer
from cache.config import Columns
from cache.ragged import Tokenised
from cache.source.place import Place

BOS, EOS, PAD, U, A, E, MASK = range(256, 263)
SPECIAL = ("[BOS]", "[EOS]", "[PAD]", "[U]", "[A]", "[E]", "[MASK]")

PLAIN = (
    "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[U]' }}{{ m.content }}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[A]{% generation %}{{ m.content }}[E]{% endgeneration %}"
    "{% else %}[U]{{ m.content }}[E]{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)

C0 = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "no"},
]
C0_IDS = [U, *b"hi", E, A, *b"ok", E, U, *b"go", E, A, *b"no", E]
C0_MASK = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]

CALLS = (
    "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[U]' }}{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.id }} {{ c.type }} {{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}[E]{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


def byte_letters() -> dict[int, str]:
    """The letter by which byte-level vocabularies write each byte, by byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


def save_tokenizer(
    directory: Path,
    template: str | None = PLAIN,
    *,
    special: tuple[str, ...] = SPECIAL,
    words: tuple[str, ...] = (),
    merges: tuple[tuple[bytes, bytes], ...] = (),
    bos: str | None = "[BOS]",
    eos: str | None = "[EOS]",
    adds_bos: bool = False,
) -> Path:
    """A tokenizer directory as transformers writes it. `words` are added tokens that are not special."""
    from transformers import PreTrainedTokenizerFast

    letters = byte_letters()
    pairs = [("".join(letters[b] for b in left), "".join(letters[b] for b in right)) for left, right in merges]
    # Merged tokens come after the special ones, so that those have the ids that the cases give them.
    merged = [left + right for left, right in pairs]
    vocabulary = {token: i for i, token in enumerate([*letters.values(), *special, *words, *merged])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="[BOS] $A", special_tokens=[("[BOS]", backend.token_to_id("[BOS]"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def chat_tokenizer(directory: Path, template: str | None = PLAIN, **options: Any) -> ChatTokenizer:
    """A `ChatTokenizer` on a new toy tokenizer; `options` of both."""
    chat = {
        "template": options.pop("template_file", None),
        "template_arguments": options.pop("template_arguments", {}),
        "supervise": options.pop("supervise", "all"),
    }
    return ChatTokenizer(save_tokenizer(directory, template, **options), **chat)


def json_batch(conversations: list[Any], **columns: list[Any]) -> pa.Table:
    """A batch as it comes from JSONL: the conversations as JSON text."""
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in conversations]
    return pa.table({"messages": pa.array(texts, pa.string()), **columns})


def tokenised(chat: ChatTokenizer, conversations: list[Any], **columns: list[Any]) -> Tokenised:
    return chat.tokenise(json_batch(conversations, **columns), Columns(), Place("chat.jsonl", 0))


def rows(made: Tokenised) -> list[tuple[list[int], list[int]]]:
    """Ids and mask of each row, as lists."""
    cuts = made.tokens.offsets[1:-1]
    pairs = zip(np.split(made.tokens.values, cuts), np.split(made.tokens.mask, cuts), strict=True)
    return [(ids.tolist(), mask.tolist()) for ids, mask in pairs] if made.tokens.num_rows else []


def supervised_runs(chat: ChatTokenizer, made: Tokenised) -> list[list[str]]:
    """The supervised runs of each row, decoded."""
    runs = []
    for ids, mask in rows(made):
        found, run = [], []
        for identity, is_supervised in zip([*ids, 0], [*mask, 0], strict=True):
            if is_supervised:
                run.append(identity)
            elif run:
                found.append(chat._tokenizer.decode(run, skip_special_tokens=False))
                run = []
        runs.append(found)
    return runs


def said(roles: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": f"{role}{i}"} for i, role in enumerate(roles)]


def calling(**call) -> list[dict]:
    given = {"function": {"name": "f", "arguments": {"a": 1}}} | call
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [given]}]
