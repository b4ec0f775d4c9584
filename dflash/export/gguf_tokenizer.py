"""The target's tokenizer as GGUF keys: byte-level BPE whose way of splitting words llama.cpp has a name for."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash.errors import TargetMismatch

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The pattern of the tokenizer's own split (None: the pattern of GPT-2), and whether digits stand alone.
_NAMES = {
    (_WORDS + r"\p{N}" + _REST, False): "qwen2",
    (_WORDS + r"\p{N}{1,3}" + _REST, False): "llama-bpe",
    (None, True): "smollm",
    (None, False): "gpt-2",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama_token_type


def tokenizer_keys(directory: Path, vocabulary: int, target: str) -> dict[str, Any]:
    """The `tokenizer.*` keys of a tokenizer with as many tokens as the target's embedding has rows.

    Raises TargetMismatch for one that is no byte-level BPE, or that splits words in a way without a name.
    """
    file = directory / "tokenizer.json"
    tree = json.loads(file.read_text()) if file.is_file() else {}
    split = _split(tree.get("pre_tokenizer") or {})
    pre = None if split is None else _NAMES.get(split)
    if tree.get("model", {}).get("type") != "BPE" or pre is None:
        raise TargetMismatch(
            f"export.layouts: gguf cannot write the tokenizer of {target}: it is no byte-level BPE that splits words "
            f"as {', '.join(_NAMES.values())} do. Convert the target with llama.cpp, python convert_hf_to_gguf.py "
            f"{directory}, and train with that file as target.model."
        )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens, types = _tokens(tree, vocabulary)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in tree["model"]["merges"]
        ],
        "tokenizer.ggml.add_bos_token": tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id],
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = getattr(tokenizer, f"{ours}_token_id")
        if number is not None:
            keys[f"tokenizer.ggml.{theirs}_token_id"] = int(number)
    if isinstance(tokenizer.chat_template, str):
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys


def _tokens(tree: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; rows of the embedding that no token has get a name, as llama.cpp's converter gives."""
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [_UNUSED] * vocabulary
    for text, number in tree["model"]["vocab"].items():
        tokens[number], types[number] = text, _NORMAL
    for added in tree.get("added_tokens", []):
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def _split(pre: dict[str, Any]) -> tuple[str | None, bool] | None:
    """The pattern that splits words and whether digits stand alone; None for what is not byte-level."""
    parts = pre.get("pretokenizers", [pre])
    *before, last = parts
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    pattern, digits = None, False
    for part in before:
        if part["type"] == "Digits" and part["individual_digits"]:
            digits = True
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            pattern = part["pattern"].get("Regex")
        else:
            return None
    return None if (pattern is None) != last.get("use_regex", True) else (pattern, digits)
