"""Arrow → disk → view: every list type, slice, null and chunking gives the rows that a plain loop gives."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from arrow_rows import Row, list_array, masks_of, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache

VOCABULARY = 100
ID_TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
MASK_TYPES = [pa.int8(), pa.uint8(), pa.int64(), pa.bool_()]


@st.composite
def sources(draw: st.DrawFn) -> tuple[pa.Table, list[Row], list[list[int] | None]]:
    """A table of several chunks, each a slice of a larger array; its rows and masks as lists."""
    kind = draw(st.sampled_from(["list", "large_list", "fixed_size_list"]))
    ids_type, mask_type = draw(st.sampled_from(ID_TYPES)), draw(st.sampled_from(MASK_TYPES))
    size, hidden = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    # The shape is drawn, the content comes from a seed: rows that are mostly good, so that most examples make a cache.
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chunks, rows, masks = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 8))
        chunk_rows: list[Row] = []
        chunk_masks: list[Row] = []
        for _ in range(count):
            length = size if kind == "fixed_size_list" else int(random.choice([0, 1, *range(2, 20)]))
            row = random.integers(0, VOCABULARY, length).tolist()
            mask = (random.random(length) < random.choice([0.2, 0.6, 1.0])).astype(int).tolist()
            fate = random.random()
            chunk_rows.append(None if fate < 0.15 else row)
            chunk_masks.append(None if 0.1 < fate < 0.2 else mask)
        low = draw(st.integers(0, min(2, count)))
        high = draw(st.integers(max(low, count - 2), count))
        columns = [
            list_array(chunk_rows, kind, ids_type, hidden, size),
            list_array(chunk_masks, kind, mask_type, hidden, size),
        ]
        chunks.append(pa.record_batch(columns, names=["input_ids", "loss_mask"]).slice(low, high - low))
        rows += chunk_rows[low:high]
        masks += chunk_masks[low:high]
    return pa.Table.from_batches(chunks), rows, masks


def expected_of(
    rows: Sequence[Row], masks: Sequence[Row], max_tokens: int, overflow: str
) -> tuple[list[list[int]], list[list[int]], list[int], Counter[str]]:
    """The rules, row by row, in plain Python."""
    kept: list[tuple[list[int], list[int], int]] = []
    dropped: Counter[str] = Counter()
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if row is None or mask is None:
            dropped["null"] += 1
        elif not row:
            dropped["empty"] += 1
        elif len(row) < 2:
            dropped["too_short"] += 1
        elif overflow == "drop" and len(row) > max_tokens:
            dropped["too_long"] += 1
        else:
            last = max_tokens if overflow == "truncate" else len(row)
            pieces = [slice(start, min(start + max_tokens, last)) for start in range(0, last, max_tokens)]
            good = [p for p in pieces if any(a and b for a, b in zip(mask[p][:-1], mask[p][1:], strict=True))]
            if good:
                dropped["no_anchor_piece"] += len(pieces) - len(good)
            else:
                dropped["no_anchor"] += 1
            kept += [(row[p], mask[p], number) for p in good]
    return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept], +dropped


def write(table: pa.Table, form: str, directory: Path, order: list[int]) -> tuple[Any, str]:
    """Put the table where a build reads it: in memory, or in a file of some format."""
    path = directory / "rows.data"
    if form == "memory":
        return table, "in memory"
    if form == "mapping":
        indices = pa.table({"indices": pa.array(order, pa.uint64())})
        return SimpleNamespace(data=SimpleNamespace(table=table), _indices=indices), "in memory"
    if form == "parquet":
        pa.parquet.write_table(table, path, row_group_size=3)
    else:
        make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression="zstd" if form == "compressed file" else None)
        with make(path, table.schema, options=options) as writer:
            writer.write_table(table)
    return None, str(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sources(),
    st.sampled_from(["memory", "mapping", "stream", "file", "compressed file", "parquet"]),
    st.integers(2, 9),
    st.sampled_from(["truncate", "drop", "split"]),
    st.data(),
)
def test_what_arrow_holds_is_what_the_view_shows(
    source: tuple[pa.Table, list[Row], list[Row]], form: str, max_tokens: int, overflow: str, data: st.DataObject
) -> None:
    table, rows, masks = source
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows and form == "mapping" else []
    if form == "mapping":
        rows, masks = [rows[index] for index in order], [masks[index] for index in order]
    expected_rows, expected_masks, numbers, dropped = expected_of(rows, masks, max_tokens, overflow)
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        given, path = write(table, form, directory, order)
        config = RowsConfig(
            source=path, vocabulary=VOCABULARY, max_tokens=max_tokens, overflow=overflow, max_dropped=1.0
        )
        if not expected_rows:
            return  # refused; another test says how
        cache = TokenCache.open(build(config, home=directory, tokenizer=None, vocabulary=None, data=given))
        cache.verify()
        assert rows_of(cache) == expected_rows
        assert masks_of(cache) == expected_masks
        assert cache.source_row.tolist() == numbers
        assert cache.manifest.dropped == dropped
        assert cache.manifest.source_rows == len(rows)
        lost = cache.manifest.truncated_tokens + cache.manifest.dropped_tokens
        whole = sum(len(row) for row, mask in zip(rows, masks, strict=True) if row is not None and mask is not None)
        assert cache.manifest.tokens + lost == whole
    finally:
        shutil.rmtree(directory)
