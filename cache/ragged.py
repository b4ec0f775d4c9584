"""Ragged rows: flat values plus offsets, and the pure operations on them.

Two shapes of one idea. `Ragged` is what comes out of a stage: rows back to back. `Spans` is what an Arrow list column
is: rows as spans of a flat array, with gaps where a row was null, cut or dropped. Nothing here loops over rows.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8
from numpy import ndarray

MIN_TOKENS = 2  # a block needs an anchor and one token to predict


def offsets_of(lengths: Int64[ndarray, "R"]) -> Int64[ndarray, "R+1"]:
    """Prefix sums in 64 bits: offset `i` is where row `i` starts, the last is the number of tokens."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows back to back: row `i` is `values[offsets[i]:offsets[i + 1]]`, and the same slice of `mask`."""

    values: Integer[ndarray, "T"]
    mask: UInt8[ndarray, "T"]
    offsets: Int64[ndarray, "ends"]  # R + 1

    @property
    def num_rows(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> Int64[ndarray, "R"]:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """What `cache.chat.tokenizer` makes of one batch of conversations.

    In a batch that was read from JSONL the column of conversations (and `tools`, where there is one) is *JSON text*
    (`pa.string()`): a schema for all rows would fill the keys that one row lacks with nulls of another. In batches
    from Arrow and Parquet it is a list of structs. A boolean column `finished` may be there; null means finished.
    """

    tokens: Ragged  # only the rows that the rules of conversations keep
    row: Int64[ndarray, "R"]  # index into the batch of the conversation each row came from; not decreasing
    split_text: list[str] | None  # first user text of each row's conversation: what the held-out split hashes
    dropped: dict[str, int]  # reason → number of conversations of the batch
    messages: dict[str, int] = field(default_factory=dict)  # `role: what became of it` → number of messages


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows as spans of a flat array, in order, none overlapping: row `i` is `values[start[i]:start[i] + length[i]]`."""

    values: Integer[ndarray, "C"]
    start: Int64[ndarray, "R"]
    length: Int64[ndarray, "R"]

    @property
    def num_rows(self) -> int:
        return self.start.size

    def select(self, rows: Bool[ndarray, "R"] | Int64[ndarray, "N"] | slice) -> "Spans":
        return Spans(self.values, self.start[rows], self.length[rows])

    def flat(self) -> Integer[ndarray, "T"]:
        """The spans' values back to back; a view where the spans have no gaps."""
        used = self.length > 0
        start = self.start[used]
        end = start + self.length[used]
        if not start.size:
            return self.values[:0]
        low, high = int(start[0]), int(end[-1])
        if int(self.length.sum()) == high - low:
            return self.values[low:high]
        # +1 where a span opens, −1 where one closes: the running sum is 1 inside spans and 0 in gaps.
        edges = np.zeros(high - low + 1, dtype=np.int8)
        edges[start - low] += 1
        edges[end - low] -= 1
        np.cumsum(edges, dtype=np.int8, out=edges)
        return np.compress(edges[:-1].view(bool), self.values[low:high])


def spans_of(values: Integer[ndarray, "T"], offsets: Int64[ndarray, "ends"]) -> Spans:
    return Spans(values, offsets[:-1], np.diff(offsets))


def windows(
    length: Int64[ndarray, "R"], size: int
) -> tuple[Int64[ndarray, "N"], Int64[ndarray, "N"], Int64[ndarray, "N"]]:
    """Rows cut into windows of `size` tokens: of each window its row, its start in the row, and its length."""
    count = np.maximum(-(-length // size), 1)  # an empty row stays one empty window
    row = np.repeat(np.arange(length.size, dtype=np.int64), count)
    inside = (np.arange(row.size, dtype=np.int64) - np.repeat(offsets_of(count)[:-1], count)) * size
    return row, inside, np.minimum(size, length[row] - inside)


def has_anchor(mask: Spans) -> Bool[ndarray, "R"]:
    """Rows with a legal anchor: a supervised position whose next one is supervised, too, and in the same row."""
    found = np.zeros(mask.num_rows, dtype=bool)
    long = np.flatnonzero(mask.length >= MIN_TOKENS)
    if not long.size:
        return found
    start, last = mask.start[long], mask.start[long] + mask.length[long] - 1
    used = mask.values[start[0] : last[-1] + 1]
    legal = np.zeros_like(used)  # as long as `used`: reduceat wants every bound to be an index
    np.bitwise_and(used[:-1], used[1:], out=legal[:-1])
    # reduceat over [start, last) and over the rest up to the next start, in turns; every second result is a row's.
    bounds = np.stack([start, last], axis=1).ravel() - start[0]
    found[long] = np.bitwise_or.reduceat(legal, bounds)[0::2] != 0
    return found


def last_runs(mask: Spans) -> Spans:
    """The rows' masks, back to back, with ones only in the last run of ones of each row."""
    flat, offsets = mask.flat(), offsets_of(mask.length)
    opens = np.flatnonzero(flat[1:] > flat[:-1]) + 1
    # Of each row, the last opening before its end, or its start where the run opens it (or none is there to keep).
    last = np.searchsorted(opens, offsets[1:], side="left") - 1
    start = np.where(last >= 0, opens[np.maximum(last, 0)] if opens.size else 0, 0)
    start = np.maximum(start, offsets[:-1])
    edges = np.zeros(flat.size + 1, dtype=np.int8)
    some = mask.length > 0
    edges[start[some]] += 1
    edges[offsets[1:][some]] -= 1
    return spans_of(flat & np.cumsum(edges, dtype=np.int8)[:-1].view(np.uint8), offsets)


def num_runs(mask: Spans) -> int:
    """Number of runs of supervised tokens, counted row by row: the answers."""
    flat = mask.flat()
    starts = np.count_nonzero(flat[1:] > flat[:-1])
    first = offsets_of(mask.length)[:-1][mask.length > 0]
    before = np.maximum(first - 1, 0)
    # A run that opens a row was counted above only where the row before it ends unsupervised.
    return int(starts + np.count_nonzero(flat[first] & np.where(first > 0, flat[before], 1)))
