"""How a tokenizer behaves, asked once: remembered by its files and by the versions of the libraries that run it.

A preparation that finds its token cache asks nobody, and imports nothing heavy.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from cache.canonical import canonical
from cache.config import RowsConfig
from cache.json_file import read_json, write_json
from cache.key.code import tokenising_code
from cache.key.tokenizer_files import PROBE, hash_vocabulary, probe_ids, read_object

LIBRARIES = ("transformers", "tokenizers", "jinja2")  # they decide what conversations become


def versions() -> dict[str, str]:
    """Of the libraries that tokenise, as installed here; nothing is imported."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def behaviour(
    rows: RowsConfig, tokenizer: Path, files: dict[str, str], sidecar: Path, *, trust_remote_code: bool
) -> dict[str, Any]:
    """`rows`: a hash of what known conversations become; `probe`, `vocabulary`: what a run compares its target with.

    `files` are hashes of the tokenizer and of the template.
    """
    config = read_object(tokenizer / "config.json")
    asked = [files, config, rows.template_arguments, versions(), tokenising_code(), trust_remote_code]
    memory = sidecar / f"behaviour-{xxhash.xxh3_128_hexdigest(canonical(asked))}.json"
    try:
        known = read_json(memory)
    except ValueError:
        known = None  # damaged: ask again
    if known is not None and known.keys() >= {"rows", "probe", "vocabulary"}:
        return known
    from cache.chat.known_answers import ask  # pulls transformers in

    known = ask(
        tokenizer,
        PROBE,
        template=rows.template,
        template_arguments=rows.template_arguments,
        trust_remote_code=trust_remote_code,
    )
    write_json(memory, known, durable=False)
    return known


def spelling(tokenizer: Path, *, by_transformers: bool, trust_remote_code: bool) -> tuple[list[int], str]:
    """Ids of the probe text and a hash of every id's text; by transformers where rows were made with it."""
    if not by_transformers:
        return probe_ids(tokenizer), hash_vocabulary(tokenizer)
    from cache.chat.known_answers import ask_spelling

    return ask_spelling(tokenizer, PROBE, trust_remote_code=trust_remote_code)
