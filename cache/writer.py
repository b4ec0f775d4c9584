"""Rows → token cache: one pass over the source, durable writes, and a commit that a reader sees whole or not at all.

The main thread reads a chunk, applies the rules and fills buffers; writer threads put full buffers on the disk
meanwhile. Nothing of the source is held beyond a chunk.
"""

import errno
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.arrays import ArrayFiles
from cache.commit import Site, commit, locked, no_room, sweep
from cache.config import RowsConfig
from cache.convert import Converter
from cache.errors import BadRow, BadSource, CacheCorrupt, CacheIncomplete, CacheMismatch
from cache.files import Part, find_parts
from cache.fingerprint import State, state_of
from cache.key import ContentKey, content_key, hash_vocabulary, probe_ids
from cache.lists import row_of
from cache.manifest import LAYOUT_VERSION, Manifest, dtype_for
from cache.shard import IdOutOfRange
from cache.source import Source, open_source
from cache.store import TokenCache

WRITERS = 2  # ids and mask are written side by side


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is."""

    rows: int  # of the source, read so far
    total_rows: int | None  # where the source tells
    bytes: int  # of tokens and mask, written so far
    seconds: float
    share: float  # of the source's bytes that were read, 0..1


Report = Callable[[Progress], None]


def build(
    rows: RowsConfig,
    *,
    home: Path,
    tokenizer: Path | None,
    vocabulary: int | None,
    progress: Report | None = None,
    data: Any = None,
) -> Path:
    """Make the token cache of these rows, or find it made; returns its directory, `home/tokens/<key>`.

    `data` is a `pyarrow.Table` or `datasets.Dataset` to read instead of `rows.source`.
    """
    parts = [] if data is not None else find_parts(rows)
    before = _states(parts)
    key = content_key(rows, tokenizer, vocabulary=vocabulary, data=data, home=home)
    site = Site.of(home, key.hex)
    if not _finished(site, rows):
        with locked(site):
            if not _finished(site, rows):  # another builder may have made it while this one waited
                sweep(site)
                source = open_source(parts, rows, data)
                _make(source, rows, key, site, tokenizer, before, progress)
    return site.final


def _finished(site: Site, rows: RowsConfig) -> bool:
    try:
        cache = TokenCache.open(site.final)
    except (CacheIncomplete, CacheCorrupt, CacheMismatch):
        return False
    if cache.key != site.final.name:
        return False
    refuse_drops(cache.manifest, rows)
    return True


def _make(
    source: Source,
    rows: RowsConfig,
    key: ContentKey,
    site: Site,
    tokenizer: Path | None,
    before: dict[Path, State],
    progress: Report | None,
) -> None:
    vocabulary = int(key.parts["vocabulary"])
    converter = Converter(source.layout, rows, _chat(source, rows, tokenizer))
    site.temporary.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="token-cache-writer") as thread:
            files = ArrayFiles(site.temporary, dtype_for(vocabulary).name, submit=thread.submit)
            try:
                write_rows(source, converter, files, vocabulary, progress)
                arrays = files.close()
            except BaseException:
                files.abandon()
                raise
        if _states(source.parts) != before:
            raise BadSource(f"{rows.source}: changed while it was read. Run again once nothing writes to it.")
        counts = converter.counts
        manifest = Manifest(
            layout_version=LAYOUT_VERSION,
            key=key.hex,
            key_parts=key.parts,
            rows=counts.rows,
            tokens=counts.tokens,
            supervised_tokens=counts.supervised_tokens,
            answers=counts.answers,
            dtype=dtype_for(vocabulary).name,
            vocabulary=vocabulary,
            arrays=arrays,
            source_rows=counts.source_rows,
            dropped={reason: number for reason, number in sorted(counts.dropped.items()) if number},
            noted=dict(sorted(getattr(converter.chat, "noted", {}).items())),
            truncated=counts.truncated,
            truncated_tokens=counts.truncated_tokens,
            dropped_tokens=counts.dropped_tokens,
            length_histogram=counts.length_histogram(),
            group_names=converter.group_names,
            tokenizer=_tokenizer_facts(tokenizer, converter.chat),
        )
        refuse_drops(manifest, rows)
        commit(site, manifest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(site, error) from error
        raise
    finally:
        shutil.rmtree(site.temporary, ignore_errors=True)  # gone by a rename when all went well


def write_rows(
    source: Source, converter: Converter, files: ArrayFiles, vocabulary: int, progress: Report | None = None
) -> None:
    """The pass: every chunk of the source through the rules and into the files."""
    started, read = time.monotonic(), 0
    token_bytes = dtype_for(vocabulary).itemsize + 1
    for chunk in source.chunks():
        made = converter(chunk)
        ids, lengths = made.rows.ids.flat(), made.rows.ids.length
        try:
            files.add(
                ids, made.rows.mask.flat(), lengths, made.side, made.group, made.rows.row + read, vocabulary=vocabulary
            )
        except IdOutOfRange as error:
            row = int(made.rows.row[row_of(lengths, error.position)])
            raise BadRow(
                f"{chunk.place(row)}, column {source.layout.rows}: token id {error.value} is "
                f"not in 0..{vocabulary - 1}, the target's vocabulary of {vocabulary}. The rows were tokenised for "
                "another model: prepare them again with their own target.model, or set rows.vocabulary."
            ) from None
        read += chunk.batch.num_rows
        if progress is not None:
            seconds = time.monotonic() - started
            progress(Progress(read, source.num_rows, files.tokens * token_bytes, seconds, chunk.read))


def refuse_drops(manifest: Manifest, rows: RowsConfig) -> None:
    """Too many dropped rows are an error, and so is a cache without a row."""
    reasons = ", ".join(f"{reason} {number}" for reason, number in manifest.dropped.items()) or "none"
    if not manifest.rows:
        raise BadSource(
            f"{rows.source}: no row is left of {manifest.source_rows}, expected at least one; dropped: {reasons}. Rows "
            "need two supervised tokens in a row within rows.max_tokens: see docs/token-cache.md for the rules."
        )
    if manifest.dropped_share > rows.max_dropped:
        raise BadSource(
            f"{rows.source}: {manifest.dropped_share:.1%} of the rows are dropped, expected at most "
            f"{rows.max_dropped:.1%} (rows.max_dropped); dropped: {reasons}. Repair the source, or raise the limit."
        )


def _chat(source: Source, rows: RowsConfig, tokenizer: Path | None) -> Any:
    if source.layout.kind == "tokens":
        return None
    if tokenizer is None:
        raise BadSource(f"{rows.source}: holds conversations, but no tokenizer was given. Set target.model.")
    from cache.chat import ChatTokenizer  # pulls torch in, which rows that came tokenised do without

    return ChatTokenizer(
        tokenizer,
        template=rows.template,
        template_arguments=rows.template_arguments,
        supervise=rows.supervise,
    )


def _tokenizer_facts(tokenizer: Path | None, chat: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    return {
        "probe": probe_ids(tokenizer),
        "vocabulary": hash_vocabulary(tokenizer),
        "stop_ids": list(getattr(chat, "stop_ids", ())),
    }


def _states(parts: Iterable[Part]) -> dict[Path, State]:
    """What the file system says of every file of the source."""
    return {file.path: state_of(file.path) for part in parts for file in (*part.files, *part.indices)}
