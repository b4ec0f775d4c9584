"""The written rules: which rows and pieces of rows are kept, and why the others are not.

One place for rows that came tokenised and for conversations. In order: rows of other groups; null, empty and too
short rows; rows over `max_tokens` (cut, dropped, or cut into windows); and last, what has no legal anchor *then*.
A row is dropped when none of its pieces is kept; a piece that is lost from a kept row is counted apart.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from cache.config import RowsConfig
from cache.ragged import MIN_TOKENS, Spans, has_anchor, num_runs, windows


@dataclass(slots=True)
class RowCounts:
    """What the rules did, over the whole source."""

    source_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    truncated_tokens: int = 0
    dropped_tokens: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    answers: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # exponent of two → rows

    def length_histogram(self) -> tuple[tuple[int, int], ...]:
        """Rows by length: (longest of the bin, how many), every bin up to the longest row."""
        return tuple((1 << power, self.lengths[power]) for power in range(1, max(self.lengths, default=0) + 1))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a chunk on their way: ids and mask of equal length, and the chunk's row each came from."""

    ids: Spans
    mask: Spans
    row: Int64[ndarray, "R"]  # not decreasing: pieces of one row are neighbours

    def select(self, keep: Bool[ndarray, "R"]) -> "Rows":
        return self if keep.all() else Rows(self.ids.select(keep), self.mask.select(keep), self.row[keep])


def usable(length: Int64[ndarray, "R"], valid: Bool[ndarray, "R"], counts: RowCounts) -> Bool[ndarray, "R"]:
    """Rows that are there and long enough for an anchor and one token to predict."""
    empty, short = valid & (length == 0), valid & (length > 0) & (length < MIN_TOKENS)
    for reason, rows in (("null", ~valid), ("empty", empty), ("too_short", short)):
        counts.dropped[reason] += int(np.count_nonzero(rows))
    counts.dropped_tokens += int(length[short].sum())
    return valid & (length >= MIN_TOKENS)


def fit(rows: Rows, policy: RowsConfig, counts: RowCounts) -> Rows:
    """Apply `max_tokens` and `overflow`, then drop what has no legal anchor; counts what it keeps and what not."""
    length = rows.ids.length
    over = length > policy.max_tokens
    lost = np.zeros(rows.row.size, dtype=bool)
    if over.any():
        if policy.overflow == "truncate":
            counts.truncated += int(np.count_nonzero(over))
            counts.truncated_tokens += int((length[over] - policy.max_tokens).sum())
            cut = np.minimum(length, policy.max_tokens)
            rows = Rows(_with_length(rows.ids, cut), _with_length(rows.mask, cut), rows.row)
        elif policy.overflow == "drop":
            lost = over
        else:
            row, inside, size = windows(length, policy.max_tokens)
            rows = Rows(_pieces(rows.ids, row, inside, size), _pieces(rows.mask, row, inside, size), rows.row[row])
            lost = np.zeros(rows.row.size, dtype=bool)
    no_anchor = ~lost & ~has_anchor(rows.mask)
    keep = ~lost & ~no_anchor
    _count_lost(rows, keep, no_anchor, counts)
    kept = rows.select(keep)
    _count_kept(kept, counts)
    return kept


def _with_length(spans: Spans, length: Int64[ndarray, "R"]) -> Spans:
    return Spans(spans.values, spans.start, length)


def _pieces(spans: Spans, row: ndarray, inside: ndarray, size: ndarray) -> Spans:
    return Spans(spans.values, spans.start[row] + inside, size)


def _count_lost(rows: Rows, keep: ndarray, no_anchor: ndarray, counts: RowCounts) -> None:
    if keep.all():
        return
    counts.dropped_tokens += int(rows.ids.length[~keep].sum())
    alive = np.zeros(int(rows.row[-1]) + 1, dtype=bool)
    alive[rows.row[keep]] = True
    is_piece = alive[rows.row]
    counts.dropped["no_anchor_piece"] += int(np.count_nonzero(no_anchor & is_piece))
    gone = np.unique(rows.row[no_anchor & ~is_piece])
    counts.dropped["no_anchor"] += gone.size
    # A conversation may give several rows; one that is over max_tokens and one without an anchor are one dropped row.
    lost = ~keep & ~no_anchor
    counts.dropped["too_long_piece"] += int(np.count_nonzero(lost & is_piece))
    counts.dropped["too_long"] += np.setdiff1d(rows.row[lost & ~is_piece], gone).size


def _count_kept(rows: Rows, counts: RowCounts) -> None:
    length = rows.ids.length
    counts.rows += length.size
    counts.tokens += int(length.sum())
    counts.supervised_tokens += int(np.count_nonzero(rows.mask.flat()))
    counts.answers += num_runs(rows.mask)
    powers = np.ceil(np.log2(np.maximum(length, 2))).astype(np.int64)
    for power, number in enumerate(np.bincount(powers).tolist()):
        if number:
            counts.lengths[power] += number
