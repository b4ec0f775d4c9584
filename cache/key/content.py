"""The content key: equal keys mean equal token caches, and nothing that cannot change the tokens is in it.

The source counts by content, never by path or time. Of a tokenizer that makes rows count its files and what it makes of
known conversations, run by the code that tokenises; of one that only stands beside rows that came tokenised, its
vocabulary. The code counts by the syntax trees of the modules that convert.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.config import RowsConfig, default_home, names_a_template
from cache.disk.manifest import LAYOUT_VERSION
from cache.errors import BadSource
from cache.key.behaviour import behaviour, spelling
from cache.key.code import PACKAGE, hash_code, tokenising_code
from cache.key.file_hashes import hash_sources, hash_table
from cache.key.tokenizer_files import hash_tokenizer, resolve_vocabulary
from cache.source.columns import Layout
from cache.source.find import SourceFiles, find_files
from cache.source.open import open_source

CHAT_FILES = ("tokenizer", "template")  # parts of a key: hashes of files by which conversations are tokenised

# Fields of `rows` that are in a key by what they come to, or change no token.
_NOT_RULES = {
    "source",
    "revision",
    "split",
    "columns",
    "groups",
    "template",
    "template_arguments",
    "max_dropped",
    "vocabulary",
}


@dataclass(frozen=True, slots=True)
class ContentKey:
    """`hex` names the cache's directory; `parts` says what went into it."""

    hex: str
    parts: dict[str, str]
    tokenizer: dict[str, Any] = field(default_factory=dict)  # what a run compares its target's with


def content_key(
    rows: RowsConfig,
    tokenizer: Path | None,
    *,
    vocabulary: int | None = None,
    data: Any = None,
    home: Path | None = None,
    parts: Sequence[SourceFiles] | None = None,
    trust_remote_code: bool = False,
) -> ContentKey:
    """The key of the token cache that these rows make.

    `home` is where hashes of files are remembered, `parts` are the files of the source where they have been found.
    """
    sidecar = sidecar_of(home or default_home())
    if parts is None:
        parts = [] if data is not None else find_files(rows)
    layout = open_source(parts, rows, data).layout
    is_chat = layout.kind == "conversations"
    rules = rows.model_dump(mode="json", exclude=_NOT_RULES) | {
        "columns": asdict(layout),
        "groups": None if rows.groups is None else sorted(set(rows.groups)),
    }
    chat_files = hash_chat_files(rows, tokenizer, sidecar) if is_chat else dict.fromkeys(CHAT_FILES, "none")
    known: dict[str, Any] = {}
    if tokenizer is not None and is_chat:
        known = behaviour(rows, tokenizer, chat_files, sidecar, trust_remote_code=trust_remote_code)
    elif tokenizer is not None:
        known = dict(
            zip(
                ("probe", "vocabulary"),
                spelling(tokenizer, by_transformers=False, trust_remote_code=False),
                strict=True,
            )
        )
    found = {
        "layout": str(LAYOUT_VERSION),
        "source": hash_table(data, rows) if data is not None else hash_sources(parts, sidecar),
        "probe": xxhash.xxh3_128_hexdigest(canonical(known)),
        **chat_files,
        "template_arguments": canonical(rows.template_arguments if is_chat else {}).decode(),
        "rules": canonical(rules).decode(),
        "vocabulary": str(resolve_vocabulary(rows, tokenizer, vocabulary)),
        "code": hash_code(PACKAGE),
    }
    facts: dict[str, Any] = {name: known[name] for name in ("probe", "vocabulary") if name in known}
    if facts:
        facts |= {"chat": is_chat, "directory": str(tokenizer)}
    return ContentKey(xxhash.xxh3_128_hexdigest(canonical(found)), found, facts)


def hash_recipe(parts: dict[str, str], layout: Layout, rows: RowsConfig) -> str:
    """All that decides which tokens and masks conversations become, `parts` being those of a content key.

    Lengths, the split, the vocabulary and `max_dropped` come later and are not in it.
    """
    recipe = {
        **{name: parts[name] for name in (*CHAT_FILES, "probe", "template_arguments")},
        "columns": asdict(layout),
        "groups": None if rows.groups is None else sorted(set(rows.groups)),
        "supervise": rows.supervise,
        "code": tokenising_code(),
    }
    return xxhash.xxh3_128_hexdigest(canonical(recipe))


def hash_chat_files(rows: RowsConfig, tokenizer: Path | None, sidecar: Path) -> dict[str, str]:
    """The parts of a key that `CHAT_FILES` names."""
    template = "the tokenizer's own"
    if rows.template:
        named = names_a_template(rows.template)
        template = f"{template}: {rows.template}" if named else _hash_file(Path(rows.template))
    return dict(zip(CHAT_FILES, (hash_tokenizer(tokenizer, sidecar), template), strict=True))


def sidecar_of(home: Path) -> Path:
    """Where the hashes of source files are remembered."""
    return home / "tokens" / ".hashes"


def _hash_file(path: Path) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except FileNotFoundError:
        raise BadSource(f"rows.template: no file at {path}. Correct rows.template.") from None
    except OSError as error:
        raise BadSource(f"rows.template: {path}: {error.strerror}. Name a file of Jinja text.") from None
