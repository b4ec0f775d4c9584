"""Which rows make which micro-batch: a pure function of the lengths, the seed and the epoch.

A seeded permutation is cut into windows; inside a window rows are sorted by length and cut by `tokens_per_batch`, so
that rows of one batch have nearly one length; then the batches are shuffled. Every row is in exactly one batch.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer
from numpy import ndarray

from cache.ragged import offsets_of

WINDOW_BATCHES = 128  # batches of one window at most: more would pad a little less, and mix rows less
MIN_WINDOWS = 4  # of an epoch that has so many batches: rows must meet other rows in other epochs


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Micro-batches of one epoch: batch `i` is `row_ids[batch_offsets[i]:batch_offsets[i + 1]]`."""

    row_ids: Int64[ndarray, "n"]
    batch_offsets: Int64[ndarray, "ends"]  # M + 1
    epoch: int

    @property
    def num_batches(self) -> int:
        return self.batch_offsets.size - 1

    def batch(self, index: int) -> Int64[ndarray, "B"]:
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of epoch {self.epoch}: expected 0..{self.num_batches - 1}")
        return self.row_ids[self.batch_offsets[index] : self.batch_offsets[index + 1]]

    def padding_efficiency(self, lengths: Int64[ndarray, "R"]) -> float:
        """Share of the padded tokens B·S that are tokens of rows."""
        if not self.num_batches:
            return 1.0
        length = lengths[self.row_ids]
        longest = np.maximum.reduceat(length, self.batch_offsets[:-1])
        return float(length.sum() / (longest * np.diff(self.batch_offsets)).sum())


def plan_epoch(
    lengths: Int64[ndarray, "R"], row_ids: Int64[ndarray, "n"], *, tokens_per_batch: int, seed: int, epoch: int
) -> EpochPlan:
    """Plan one epoch over `row_ids`; B·S of a batch stays within `tokens_per_batch`, a longer row is its own batch."""
    if not row_ids.size:
        return EpochPlan(row_ids, np.zeros(1, dtype=np.int64), epoch)
    # Raw words of the counter-based generator: numpy promises that they never change, unlike Generator.permutation.
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    rows = row_ids[_ascending(random.random_raw(row_ids.size) >> np.uint64(32))]
    length = lengths[rows]

    rows_per_batch = max(1.0, tokens_per_batch / max(1.0, float(length.mean())))
    size = round(min(WINDOW_BATCHES * rows_per_batch, max(rows_per_batch, rows.size / MIN_WINDOWS)))
    longest_first = _ascending(int(length.max()) - length)
    place = longest_first[_ascending(longest_first // size)]
    first = _first_rows(length[place], size, tokens_per_batch)

    # Inside a batch rows stand in the order of the permutation, so that no epoch repeats another's.
    count = np.diff(np.append(first, rows.size))
    batch = np.empty(rows.size, dtype=np.int64)
    batch[place] = np.repeat(np.arange(first.size), count)
    rows = rows[_ascending(batch)]
    chosen = _ascending(random.random_raw(first.size) >> np.uint64(32))
    offsets = offsets_of(count[chosen])
    source = np.repeat(first[chosen] - offsets[:-1], count[chosen]) + np.arange(rows.size)
    return EpochPlan(rows[source], offsets, epoch)


def _ascending(keys: Integer[ndarray, "n"]) -> Int64[ndarray, "n"]:
    """Order of non-negative keys, equal ones as they stand: 16 bits at a time, which numpy sorts by radix."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    while (keys := keys >> 16).any():
        order = order[np.argsort(keys.astype(np.uint16)[order], kind="stable")]
    return order


def _first_rows(length: Int64[ndarray, "n"], size: int, tokens_per_batch: int) -> Int64[ndarray, "M"]:
    """Index of each batch's first row, where windows are sorted longest first: S is the first row's length."""
    rows = np.arange(length.size)
    end = np.minimum((rows // size + 1) * size, length.size)
    following = np.minimum(rows + np.maximum(1, tokens_per_batch // np.maximum(1, length)), end)
    # All windows step to their next batch at once, until none has one.
    starts, cuts = rows[::size], []
    stops = end[starts]
    while starts.size:
        cuts.append(starts)
        starts = following[starts]
        within = starts < stops
        starts, stops = starts[within], stops[within]
    return np.sort(np.concatenate(cuts))
