"""The content key: equal keys mean equal token caches, and nothing that cannot change the tokens is in it.

The source counts by content, never by path or time; the tokenizer by its files and by what it makes of a probe text;
the code by the syntax trees of the modules that convert. Neither torch nor transformers is imported here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.config import RowsConfig, default_home
from cache.disk.manifest import LAYOUT_VERSION
from cache.errors import BadSource
from cache.key.code import PACKAGE, hash_code, tokenising_code
from cache.key.file_hashes import hash_sources, hash_table
from cache.key.tokenizer_files import hash_tokenizer, probe_ids, resolve_vocabulary
from cache.source.columns import Layout
from cache.source.find import find_files

CHAT_FILES = ("tokenizer", "template")  # parts of a key: hashes of files by which conversations are tokenised


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
        "source": hash_table(data, rows) if data is not None else hash_sources(find_files(rows), sidecar),
        "probe": ",".join(str(i) for i in probe_ids(tokenizer)),
        **hash_chat_files(rows, tokenizer),
        "template_arguments": canonical(rows.template_arguments).decode(),
        "rules": canonical(policies).decode(),
        "vocabulary": str(resolve_vocabulary(rows, tokenizer, vocabulary)),
        "code": hash_code(PACKAGE),
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
    return dict(zip(CHAT_FILES, (hash_tokenizer(tokenizer), template), strict=True))


def sidecar_of(home: Path) -> Path:
    """Where the hashes of source files are remembered."""
    return home / "tokens" / ".hashes"


def _hash_file(path: Path) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except FileNotFoundError:
        raise BadSource(f"rows.template: no file at {path}. Correct rows.template.") from None
