"""What of a tokenizer is in a key: its files, the ids of a probe text, the text of every id."""

import json
from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.config import RowsConfig
from cache.errors import BadSource

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip

# Words, digits, blanks, a newline, letters outside ASCII, and a surrogate pair: what tokenizers differ in.
PROBE = "The 12 quick foxes' naïve  test:\n\t日本語 😀 <|im_start|> 3.14159"


def resolve_vocabulary(rows: RowsConfig, tokenizer: Path | None, vocabulary: int | None) -> int:
    """Number of ids a row may use: as told, else as the target's config says, else as its tokenizer has tokens."""
    told = rows.vocabulary or vocabulary
    if told is not None:
        return told
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        config = json.loads((tokenizer / "config.json").read_text())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        if isinstance(size, int):
            return size
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        return int(_load(tokenizer).get_vocab_size(with_added_tokens=True))
    raise BadSource(
        "rows.vocabulary: not set, and there is no target to read it from, expected the number of the target's token "
        "ids. Set rows.vocabulary: ids are checked against it, and it decides how wide they are stored."
    )


def probe_ids(tokenizer: Path | None) -> list[int]:
    """Ids of a probe text, special tokens included: files may stay as they are while a backend changes what it does."""
    if tokenizer is None or not (tokenizer / "tokenizer.json").is_file():
        return []
    return [int(i) for i in _load(tokenizer).encode(PROBE).ids]


def hash_vocabulary(tokenizer: Path) -> str:
    """Hash of the text of every token id: two tokenizers that agree on the probe may differ in a token beyond it."""
    if not (tokenizer / "tokenizer.json").is_file():
        return ""
    texts = _load(tokenizer).get_vocab(with_added_tokens=True)
    return xxhash.xxh3_128_hexdigest(canonical(sorted((number, text) for text, number in texts.items())))


def hash_tokenizer(tokenizer: Path | None) -> str:
    """Hash of the files that make a tokenizer, its template and where it stops."""
    if tokenizer is None:
        return "none"
    found = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not found:
        raise BadSource(f"{tokenizer}: no tokenizer in it, expected tokenizer.json. Set target.model to a directory.")
    digest = xxhash.xxh3_128()
    for path in found:
        digest.update(f"{path.name}:{xxhash.xxh3_128_hexdigest(path.read_bytes())};".encode())
    return digest.hexdigest()


def _load(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer  # not needed where rows came tokenised

    return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
