"""Ragged rows: flat values plus offsets, and the pure operations on them.

Two shapes of one idea. `Ragged` is what comes out of a stage: rows back to back. `Spans` is what an Arrow list column
is: rows as spans of a flat array, with gaps where a row was null, cut or dropped. Nothing here loops over rows.
"""

from dataclasses import dataclass

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
    offsets: Int64[ndarray, "R+1"]

    @property
    def num_rows(self) -> int:
        return self.offsets.size - 1

    @property
    def lengths(self) -> Int64[ndarray, "R"]:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Tokenised:
    """What `cache.chat` makes of one batch of conversations.

    In a batch that was read from JSONL the column of conversations (and `tools`, where there is one) is *JSON text*
    (`pa.string()`): a schema for all rows would fill the keys that one row lacks with nulls of another. In batches
    from Arrow and Parquet it is a list of structs. A boolean column `finished` may be there; null means finished.
    """

    tokens: Ragged  # only the rows that the rules of conversations keep
    row: Int64[ndarray, "R"]  # index into the batch of the conversation each row came from; not decreasing
    split_text: list[str] | None  # first user text of each row's conversation: what the held-out split hashes
    dropped: dict[str, int]  # reason → number of conversations of the batch
    answers: int  # number of supervised answers in `tokens`


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows as spans of a flat array, in order and without overlap: row `i` is `values[start[i]:start[i] + length[i]]`."""

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
        inside = np.cumsum(edges[:-1], dtype=np.int8, out=edges[:-1]).view(bool)
        return self.values[low:high][inside]


def spans_of(values: Integer[ndarray, "T"], offsets: Int64[ndarray, "R+1"]) -> Spans:
    return Spans(values, offsets[:-1], np.diff(offsets))


def windows(
    length: Int64[ndarray, "R"], size: int
) -> tuple[Int64[ndarray, "N"], Int64[ndarray, "N"], Int64[ndarray, "N"]]:
    """Rows cut into windows of `size` tokens: of each window its row, its start in the row, and its length."""
    count = np.maximum(-(-length // size), 1)  # an empty row stays one empty window
    row = np.repeat(np.arange(length.size, dtype=np.int64), count)
    inside = (np.arange(row.size, dtype=np.int64) - np.repeat(offsets_of(count)[:-1], count)) * size
    return row, inside, np.minimum(size, length[row] - inside)


def num_anchors(mask: Spans) -> Int64[ndarray, "R"]:
    """Number of legal anchors of each row: positions whose own token and the next are supervised, both in the row."""
    pairs = np.zeros(mask.num_rows, dtype=np.int64)
    long = np.flatnonzero(mask.length >= MIN_TOKENS)
    if not long.size:
        return pairs
    low = int(mask.start[long[0]])
    high = int(mask.start[long[-1]] + mask.length[long[-1]])
    used = mask.values[low:high]
    legal = np.empty(used.size, dtype=np.uint8)  # one longer than the pairs: reduceat needs an index for the last end
    np.bitwise_and(used[:-1], used[1:], out=legal[:-1])
    legal[-1] = 0
    # reduceat over [start, last token) and the rest in between; every second sum is a row's.
    bounds = np.empty(2 * long.size, dtype=np.int64)
    bounds[0::2] = mask.start[long] - low
    bounds[1::2] = mask.start[long] + mask.length[long] - 1 - low
    pairs[long] = np.add.reduceat(legal, bounds, dtype=np.int64)[0::2]
    return pairs


def num_supervised(mask: Spans) -> int:
    return int(np.count_nonzero(mask.flat()))
