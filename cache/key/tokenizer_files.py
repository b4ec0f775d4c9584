"""What of a tokenizer is in a key: its files where rows are made with it, else its vocabulary."""

from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.chat.token_places import hash_texts
from cache.config import RowsConfig
from cache.errors import BadSource
from cache.json_file import read_json
from cache.key.file_hashes import hash_file

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

# Words, digits, blanks, a newline, letters outside ASCII, and a surrogate pair: what tokenizers differ in.
PROBE = "The 12 quick foxes' naïve  test:\n\t日本語 😀 <|im_start|> 3.14159"


def resolve_vocabulary(rows: RowsConfig, tokenizer: Path | None, vocabulary: int | None) -> int:
    """Number of ids a row may use: as told, else as the target's config says, else as its tokenizer has tokens."""
    told = rows.vocabulary or vocabulary
    if told is not None:
        return told
    if tokenizer is not None:
        config = read_object(tokenizer / "config.json")
        text_config = config.get("text_config")
        size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        if isinstance(size, int):
            return size
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        return int(_load(tokenizer).get_vocab_size(with_added_tokens=True))
    raise BadSource(
        "rows.vocabulary: not set, and there is no target to read it from, expected the number of the target's token "
        "ids. Set rows.vocabulary: ids are checked against it, and it decides how wide they are stored."
    )


def probe_ids(tokenizer: Path | None) -> list[int]:
    """Ids that the file tokenizer.json alone gives a probe text, special tokens included."""
    if tokenizer is None or not (tokenizer / "tokenizer.json").is_file():
        return []
    return [int(i) for i in _load(tokenizer).encode(PROBE).ids]


def hash_vocabulary(tokenizer: Path) -> str:
    """Hash of the text of every token id: two tokenizers that agree on the probe may differ in a token beyond it."""
    return hash_texts(_load(tokenizer)) if (tokenizer / "tokenizer.json").is_file() else ""


def hash_tokenizer(tokenizer: Path | None, sidecar: Path) -> str:
    """Hash of the files by which conversations are tokenised: tokenizer, template, where it stops, code of its own."""
    if tokenizer is None:
        return "none"
    found = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not found:
        raise BadSource(f"{tokenizer}: no tokenizer in it, expected tokenizer.json. Set target.model to a directory.")
    found += sorted(tokenizer.glob("*.py")) + sorted(tokenizer.glob("additional_chat_templates/*.jinja"))
    files = {str(path.relative_to(tokenizer)): hash_file(path, sidecar) for path in found}
    config = read_object(tokenizer / "config.json")
    # transformers picks the class of a tokenizer by these; the rest of config.json is about weights.
    picks = {name: config.get(name) for name in ("model_type", "tokenizer_class", "auto_map")}
    stops = read_object(tokenizer / "generation_config.json").get("eos_token_id")
    return xxhash.xxh3_128_hexdigest(canonical([files, picks, stops]))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. Raises BadSource for anything else."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise BadSource(f"{path}: not JSON ({error}). Download the target's files again.") from None
    if content is not None and not isinstance(content, dict):
        raise BadSource(f"{path}: a JSON {type(content).__name__}, expected an object. Download the files again.")
    return content or {}


def _load(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer  # not needed where rows came tokenised and no tokenizer is given

    try:
        return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    except Exception as error:  # the library raises nothing more special
        raise BadSource(
            f"{tokenizer / 'tokenizer.json'}: cannot be read ({error}). Download the target's files again."
        ) from None
