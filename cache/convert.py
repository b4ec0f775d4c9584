"""A chunk of the source → rows for the token cache, whether it came tokenised or as conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64, UInt8
from numpy import ndarray

from cache.columns import Layout
from cache.config import Columns, RowsConfig
from cache.errors import BadSource
from cache.lists import equal_lengths, mask_of, mask_of_labels, spans_of_list
from cache.ragged import Spans, Tokenised, last_runs, offsets_of, spans_of
from cache.rules import Counts, Rows, fit, sides_of_ids, sides_of_texts, usable
from cache.source import Chunk

MAX_GROUPS = 1 << 16  # the group column is 16 bits wide
NO_GROUP = "none"


@runtime_checkable
class Tokenises(Protocol):
    """What `cache.chat.ChatTokenizer` does for the writer."""

    def tokenise(
        self, batch: pa.RecordBatch, columns: Columns, first_row: int, source: str, *, lines: bool = False
    ) -> Tokenised: ...


@dataclass(frozen=True, slots=True)
class Converted:
    """What a chunk adds to the cache."""

    rows: Rows  # kept; `row` counts from the chunk's first row
    side: UInt8[ndarray, "R"]
    group: Int64[ndarray, "R"]


@dataclass(slots=True)
class Converter:
    """Applies the rules chunk by chunk; holds the counts and the group names met so far."""

    layout: Layout
    policy: RowsConfig
    chat: Tokenises | None
    counts: Counts = field(default_factory=Counts)
    _groups_met: dict[str, int] = field(default_factory=dict)

    def __call__(self, chunk: Chunk) -> Converted:
        self.counts.source_rows += chunk.batch.num_rows
        group = self._groups(chunk.batch)
        wanted = self._wanted(group)
        self.counts.dropped["other_group"] += int(np.count_nonzero(~wanted))
        return self._conversations(chunk, group, wanted) if self.chat else self._tokens(chunk, group, wanted)

    @property
    def group_names(self) -> list[str]:
        """Names of the groups, by their number."""
        return list(self._groups_met)

    def _tokens(self, chunk: Chunk, group: ndarray, wanted: ndarray) -> Converted:
        layout, place = self.layout, chunk.place
        assert layout.ids is not None
        ids, valid = spans_of_list(chunk.batch.column(layout.ids), layout.ids, place)
        mask = None
        if layout.mask is not None:
            mask, has_mask = spans_of_list(chunk.batch.column(layout.mask), layout.mask, place)
            valid = valid & has_mask
            equal_lengths(ids, mask, valid, (layout.ids, layout.mask), place)
        # Rows of other groups count as such and as nothing else.
        keep = usable(ids.length[wanted], valid[wanted], self.counts)
        row = np.flatnonzero(wanted)[keep].astype(np.int64, copy=False)
        ids = ids.select(row)
        rows = Rows(ids, self._mask(ids, mask and mask.select(row), row, chunk), row)
        side = np.zeros(chunk.batch.num_rows, dtype=np.uint8)
        if self.policy.held_out:
            side[row] = sides_of_ids(ids, self.policy.held_out)
        kept = fit(rows, self.policy, self.counts)
        return Converted(kept, side[kept.row], group[kept.row])

    def _mask(self, ids: Spans, mask: Spans | None, row: ndarray, chunk: Chunk) -> Spans:
        """The rows' mask as uint8 of 0 and 1, back to back."""
        offsets = offsets_of(ids.length)
        if mask is None:
            flat = np.ones(int(offsets[-1]), dtype=np.uint8)
        elif self.layout.mask_is_labels:
            flat = mask_of_labels(mask, ids, (str(self.layout.ids), str(self.layout.mask)), row, chunk.place)
        else:
            flat = mask_of(mask, str(self.layout.mask), row, chunk.place)
        spans = spans_of(flat, offsets)
        return last_runs(spans) if self.policy.supervise == "last" else spans

    def _conversations(self, chunk: Chunk, group: ndarray, wanted: ndarray) -> Converted:
        assert self.chat is not None
        parts = []
        # Runs of neighbours, so that a row's number in an error stays true.
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        for start, stop in zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True):
            batch = chunk.batch.slice(start, stop - start)
            place = chunk.place
            made = self.chat.tokenise(
                batch, self.layout.columns(), place.first_row + start, place.file, lines=place.lines
            )
            self.counts.dropped.update(made.dropped)
            parts.append((start, made))
        tokens = [made.tokens for _, made in parts]
        offsets = offsets_of(_joined([part.lengths for part in tokens], np.int64))
        row = _joined([made.row + start for start, made in parts], np.int64)
        rows = Rows(
            spans_of(_joined([part.values for part in tokens], np.int64), offsets),
            spans_of(_joined([part.mask for part in tokens], np.uint8), offsets),
            row,
        )
        texts = [text for _, made in parts for text in made.split_text or ()]
        assert len(texts) == row.size
        side = np.zeros(chunk.batch.num_rows, dtype=np.uint8)
        side[row] = sides_of_texts(texts, self.policy.held_out)
        long = usable(rows.ids.length, np.ones(row.size, dtype=bool), self.counts)
        kept = fit(rows.select(long), self.policy, self.counts)
        return Converted(kept, side[kept.row], group[kept.row])

    def _groups(self, batch: pa.RecordBatch) -> Int64[ndarray, "R"]:
        """Index into `group_names` of each row; a loop over distinct names only."""
        if self.layout.group is None:
            self._groups_met.setdefault("all", 0)
            return np.zeros(batch.num_rows, dtype=np.int64)
        encoded = batch.column(self.layout.group).cast(pa.string()).fill_null(NO_GROUP).dictionary_encode()
        met = self._groups_met
        numbers = [met.setdefault(name, len(met)) for name in encoded.dictionary.to_pylist()]
        if len(met) > MAX_GROUPS:
            raise BadSource(
                f"column {self.layout.group}: more than {MAX_GROUPS} different domains, expected a few. It seems to "
                "hold something else: set rows.columns.group."
            )
        group: ndarray = np.array(numbers, dtype=np.int64)[np.asarray(encoded.indices)]
        return group

    def _wanted(self, group: Int64[ndarray, "R"]) -> Bool[ndarray, "R"]:
        if self.policy.groups is None:
            return np.ones(group.size, dtype=bool)
        wanted = np.array([name in self.policy.groups for name in self._groups_met], dtype=bool)
        chosen: ndarray = wanted[group]
        return chosen


def _joined(arrays: Sequence[Any], dtype: Any) -> ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
