"""Rows → token cache: one pass over the source, durable writes, and a commit that a reader sees whole or not at all.

The main thread reads a chunk, applies the rules and fills buffers; writer threads put full buffers on the disk
meanwhile. Nothing of the source is held beyond a chunk.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cache.config import RowsConfig
from cache.disk.arrays import ArrayFiles
from cache.disk.commit import Site, commit, locked, no_room, sweep
from cache.disk.manifest import LAYOUT_VERSION, ArrayFacts, Manifest, dtype_for, few
from cache.disk.shard import IdOutOfRange
from cache.disk.store import TokenCache
from cache.elsewhere.files import given_as
from cache.elsewhere.places import fetched
from cache.errors import BadRow, BadSource, CacheCorrupt, CacheIncomplete, CacheMismatch
from cache.key.behaviour import versions
from cache.key.content import ContentKey, content_key
from cache.key.file_hashes import State, states_of
from cache.rows.audit import counted, histogram
from cache.rows.convert import Converter
from cache.slices.make import Assembly, Tokeniser
from cache.slices.pieces import PlacedPiece
from cache.slices.plan import num_rows_of, plan_slices
from cache.source.chunks import Chunk
from cache.source.columns import Layout
from cache.source.find import SourceFiles, find_files
from cache.source.list_columns import row_of
from cache.source.open import Source, open_source

TOKENISING = 0.98  # of a build's time, where there is something to tokenise
WRITERS = 2  # ids and mask are written side by side


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is."""

    rows: int  # of the source, read so far
    total_rows: int | None  # where the source tells
    bytes: int  # of tokens and mask, written so far
    seconds: float
    share: float  # of the source's bytes that were read, 0..1


Report = Callable[[BuildProgress], None]


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """Where a tokenizer is, and whether code that comes with it may run."""

    directory: Path | None
    trust_remote_code: bool


@runtime_checkable
class Supply(Protocol):
    """Where rows come from: a source of tokens, or the slices of conversations."""

    @property
    def layout(self) -> Layout: ...

    @property
    def num_rows(self) -> int | None: ...

    def chunks(self) -> Iterator[Chunk] | Iterator[PlacedPiece]: ...


def build(
    rows: RowsConfig,
    *,
    home: Path,
    tokenizer: Path | None,
    vocabulary: int | None,
    progress: Report | None = None,
    data: Any = None,
    trust_remote_code: bool = False,
) -> Path:
    """Make the token cache of these rows, or find it made; returns its directory, `home/tokens/<key>`.

    `data` is a `pyarrow.Table` or `datasets.Dataset` to read instead of `rows.source`; `trust_remote_code` runs the
    code that a tokenizer brings.
    """
    rows = rows if data is not None else fetched(rows, home)
    parts = [] if data is not None else find_files(rows)
    before = states_of(parts)
    key = content_key(
        rows,
        tokenizer,
        vocabulary=vocabulary,
        data=data,
        home=home,
        parts=parts,
        trust_remote_code=trust_remote_code,
    )
    site = Site.of(home, key.hex)
    if not _finished(site, rows):
        with locked(site):
            if not _finished(site, rows):  # another builder may have made it while this one waited
                sweep(site)
                source = open_source(parts, rows, data)
                _make(source, rows, key, site, _Tokenizer(tokenizer, trust_remote_code), parts, before, progress)
    return site.final


def _finished(site: Site, rows: RowsConfig) -> bool:
    try:
        cache = TokenCache.open(site.final)
    except (CacheIncomplete, CacheCorrupt, CacheMismatch):
        return False
    if cache.key != site.final.name:
        return False
    refuse_drops(cache.manifest, rows)
    with contextlib.suppress(OSError):
        os.utime(site.final)  # used: `clean` keeps what is young
    return True


class _BuildWatch:
    """Tells how far a build is. Conversations are tokenised first, which takes nearly all of its time."""

    def __init__(self, report: Report | None) -> None:
        self._report, self._started = report, time.monotonic()
        self._rows = 0
        self._total_rows: int | None = None
        self._before = 0.0  # share of the work that comes before anything is written

    def expect(self, total_rows: int | None) -> None:
        """Say how many rows will be tokenised before anything is written."""
        self._total_rows, self._before = total_rows, TOKENISING

    def tokenised(self, rows: int) -> None:
        self._rows += rows
        share = self._before * min(1.0, self._rows / self._total_rows) if self._total_rows else 0.0
        self._tell(BuildProgress(self._rows, self._total_rows, 0, 0.0, share))

    def written(self, progress: BuildProgress) -> None:
        self._tell(replace(progress, share=self._before + (1 - self._before) * progress.share))

    def _tell(self, progress: BuildProgress) -> None:
        if self._report is not None:
            self._report(replace(progress, seconds=time.monotonic() - self._started))


def _make(
    source: Source,
    rows: RowsConfig,
    key: ContentKey,
    site: Site,
    tokenizer: _Tokenizer,
    found: list[SourceFiles],
    before: dict[Path, State],
    progress: Report | None,
) -> None:
    vocabulary = int(key.parts["vocabulary"])
    converter = Converter(source.layout, rows)
    watch = _BuildWatch(progress)
    site.temporary.mkdir(parents=True)
    try:
        is_chat = source.layout.kind == "conversations"
        supply: Supply = _tokenised(source, rows, key, site, tokenizer, watch) if is_chat else source
        arrays = _write_arrays(supply, converter, site, vocabulary, watch)
        if found and (find_files(rows) != found or states_of(found) != before):
            raise BadSource(f"{rows.source}: changed while it was read. Run again once nothing writes to it.")
        manifest = _manifest(key, vocabulary, converter, arrays, rows, found)
        refuse_drops(manifest, rows)
        converter.balance.refuse(str(rows.source), rows.held_out)
        if is_chat:
            converter.audit.refuse(str(rows.source), manifest.tokens, manifest.supervised_tokens)
        commit(site, manifest)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(site, error) from error
        raise
    finally:
        shutil.rmtree(site.temporary, ignore_errors=True)  # gone by a rename when all went well


def _write_arrays(
    supply: Supply, converter: Converter, site: Site, vocabulary: int, watch: _BuildWatch
) -> dict[str, ArrayFacts]:
    """All rows into the files of the arrays, which are durable when this returns."""
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="token-cache-writer") as thread:
        files = ArrayFiles(site.temporary, dtype_for(vocabulary).name, submit=thread.submit)
        try:
            write_rows(supply, converter, files, vocabulary, watch.written)
            return files.close()
        except BaseException:
            files.abandon()
            raise


def _manifest(
    key: ContentKey,
    vocabulary: int,
    converter: Converter,
    arrays: dict[str, ArrayFacts],
    rows: RowsConfig,
    found: list[SourceFiles],
) -> Manifest:
    """What the pass has counted, as the cache says it of itself."""
    counts, audit = converter.counts, converter.audit
    return Manifest(
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
        dropped=counted(counts.dropped),
        noted=counted(counts.noted),
        truncated=counts.truncated,
        truncated_tokens=counts.truncated_tokens,
        dropped_tokens=counts.dropped_tokens,
        length_histogram=counts.length_histogram(),
        group_names=converter.group_names,
        messages=counted(audit.messages),
        supervised_shares=histogram(audit.shares),
        answers_a_row=histogram(audit.answers),
        tokenizer=key.tokenizer | {"stop_ids": converter.stop_ids} if key.tokenizer else {},
        files=sum(len(part.files) for part in found),
        files_left_out=sum(part.left_out for part in found),
        sources=few(list(map(given_as, [rows.source] if isinstance(rows.source, str) else rows.source))),
        versions=versions(),
    )


def _tokenised(
    source: Source, rows: RowsConfig, key: ContentKey, site: Site, tokenizer: _Tokenizer, watch: _BuildWatch
) -> Assembly:
    """The source's conversations as tokens, once every slice of them is there."""
    home = site.final.parent.parent
    plan = plan_slices(
        source, rows, tokenizer.directory, key.parts, home, trust_remote_code=tokenizer.trust_remote_code
    )
    tokeniser = Tokeniser(plan, source.table)
    missing = plan.missing()
    if missing:
        watch.expect(num_rows_of(missing))
        tokeniser.make_missing(missing, watch.tokenised)
    return Assembly(plan, tokeniser)


def write_rows(
    source: Supply, converter: Converter, files: ArrayFiles, vocabulary: int, progress: Report | None = None
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
        read += chunk.num_rows
        if progress is not None:
            seconds = time.monotonic() - started
            progress(BuildProgress(read, source.num_rows, files.tokens * token_bytes, seconds, chunk.read))


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
