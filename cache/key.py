"""The content key: equal keys mean equal token caches, and nothing that cannot change the tokens is in it.

The source counts by content, never by path or time; the tokenizer by its files and by what it makes of a probe text;
the code by the syntax trees of the modules that convert. Neither torch nor transformers is imported here.
"""

import ast
import functools
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.columns import Layout
from cache.config import RowsConfig, default_home
from cache.errors import BadSource
from cache.files import find_parts
from cache.fingerprint import hash_parts, hash_table
from cache.manifest import LAYOUT_VERSION

# Modules that only read a finished cache, or only decide where and when one is built. All others convert: a new
# module is in the key until someone says that it cannot change a token.
NOT_CONVERTING = frozenset({
    "__init__", "__main__", "commit", "config", "errors", "fingerprint", "gather", "key", "plan", "progress", "removal",
    "readahead", "show", "store",
})  # fmt: skip

# Of those that convert, what works on tokens alone: an edit here leaves slices of conversations as they are.
AFTER_TOKENS = frozenset({"arrays", "audit", "convert", "manifest", "metadata", "rules", "shard", "writer"})

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip

CHAT_FILES = ("tokenizer", "template")  # parts of a key: hashes of files by which conversations are tokenised

# Words, digits, blanks, a newline, letters outside ASCII, and a surrogate pair: what tokenizers differ in.
PROBE = "The 12 quick foxes' naïve  test:\n\t日本語 😀 <|im_start|> 3.14159"


@dataclass(frozen=True, slots=True)
class ContentKey:
    """`hex` names the cache's directory; `parts` says what went into it."""

    hex: str
    parts: dict[str, str]


def content_key(
    rows: RowsConfig,
    tokenizer: Path | None,
    *,
    vocabulary: int | None = None,
    data: Any = None,
    home: Path | None = None,
) -> ContentKey:
    """The key of the token cache that these rows make; `home` is where hashes of source files are remembered."""
    sidecar = sidecar_of(home or default_home())
    policies = rows.model_dump(
        mode="json", exclude={"source", "template", "template_arguments", "max_dropped", "vocabulary"}
    )
    parts = {
        "layout": str(LAYOUT_VERSION),
        "source": hash_table(data, rows) if data is not None else hash_parts(find_parts(rows), sidecar),
        "probe": ",".join(str(i) for i in probe_ids(tokenizer)),
        **hash_chat_files(rows, tokenizer),
        "template_arguments": canonical(rows.template_arguments).decode(),
        "rules": canonical(policies).decode(),
        "vocabulary": str(resolve_vocabulary(rows, tokenizer, vocabulary)),
        "code": hash_code(Path(__file__).parent),
    }
    return ContentKey(xxhash.xxh3_128_hexdigest(canonical(parts)), parts)


def hash_recipe(parts: dict[str, str], layout: Layout, rows: RowsConfig) -> str:
    """All that decides which tokens and masks conversations become, `parts` being those of a content key.

    Lengths, the split, the vocabulary and `max_dropped` come later and are not in it.
    """
    recipe = {
        **{name: parts[name] for name in (*CHAT_FILES, "probe", "template_arguments")},
        "columns": asdict(layout),
        "groups": None if rows.groups is None else sorted(rows.groups),
        "supervise": rows.supervise,
        "code": tokenising_code(),
    }
    return xxhash.xxh3_128_hexdigest(canonical(recipe))


def hash_chat_files(rows: RowsConfig, tokenizer: Path | None) -> dict[str, str]:
    """The parts of a key that `CHAT_FILES` names."""
    template = _hash_file(Path(rows.template)) if rows.template else "the tokenizer's own"
    return dict(zip(CHAT_FILES, (_hash_tokenizer(tokenizer), template), strict=True))


def tokenising_code() -> str:
    """Hash of the modules that make tokens of conversations."""
    return hash_code(Path(__file__).parent, AFTER_TOKENS)


def sidecar_of(home: Path) -> Path:
    """Where the hashes of source files are remembered."""
    return home / "tokens" / ".hashes"


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


@functools.cache  # the code that runs is the code that was there when this process began
def hash_code(package: Path, without: frozenset[str] = frozenset()) -> str:
    """Hash of the syntax trees of the modules that convert: comments, docstrings and line breaks are not in it."""
    digest = xxhash.xxh3_128()
    for name, path in modules_of(package).items():
        if not _among(name, NOT_CONVERTING | without):
            tree = _parse(path.read_text(encoding="utf-8"))
            digest.update(f"{name}:{_spell(tree)};".encode())
    return digest.hexdigest()


def modules_of(package: Path) -> dict[str, Path]:
    """Every module below a package by its dotted name there, sorted by name; `__init__` modules too."""
    names = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    return dict(sorted(names.items()))


def _among(name: str, named: frozenset[str]) -> bool:
    """Whether a module is named, or lies in a subpackage that is."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in named for end in range(1, len(parts) + 1))


def _parse(source: str) -> ast.Module:
    """`ast.parse`, again when Python 3.11 mixed up the trees of two threads: it counts their depth together."""
    for _ in range(100):
        try:
            return ast.parse(source)
        except SystemError:
            time.sleep(0.01)
    return ast.parse(source)


def _spell(node: Any) -> str:
    """One spelling of a syntax tree in every version of Python, unlike `ast.dump`: empty fields are left out."""
    if isinstance(node, list):
        return "[" + ",".join(_spell(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = fields["body"][1:]
    filled = (f"{name}={_spell(value)}" for name, value in fields.items() if value is not None and value != [])
    return f"{type(node).__name__}({','.join(filled)})"


def _hash_tokenizer(tokenizer: Path | None) -> str:
    if tokenizer is None:
        return "none"
    found = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not found:
        raise BadSource(f"{tokenizer}: no tokenizer in it, expected tokenizer.json. Set target.model to a directory.")
    digest = xxhash.xxh3_128()
    for path in found:
        digest.update(f"{path.name}:{_hash_file(path)};".encode())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except FileNotFoundError:
        raise BadSource(f"rows.template: no file at {path}. Correct rows.template.") from None


def _load(tokenizer: Path) -> Any:
    from tokenizers import Tokenizer  # not needed where rows came tokenised

    return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
