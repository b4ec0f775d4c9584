"""Which rows make which optimizer step: a pure function of the rows' sizes, `tokens_per_step`, the seed and the epoch.

A seeded permutation is cut into windows. Inside a window rows are sorted by slots and tokens and cut into groups of
neighbours; a group is eight units of equally many rows, and the order of groups is shuffled. A step takes as many
groups as come closest to `tokens_per_step`. So 2, 4 or 8 processes that share out the units of a step get about the
same, and rows that run together are about equally long. Every row is in exactly one unit of one step.

Nothing here knows how many processes there are or what fits a device: the same steps are made everywhere.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int32, Int64, Integer
from numpy import ndarray

from cache.ragged import offsets_of

UNITS = 8  # of a group: a step is shared out evenly among as many processes, and among 2 and 4
GROUP_TOKENS = 16_384  # of a group at most, about: larger steps mix groups of several lengths
WINDOW_GROUPS = 256  # of one window at most: more would pad a little less, and mix rows less
MIN_WINDOWS = 4  # of an epoch that has so many groups: rows must meet other rows in other epochs


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Steps of one epoch: step `s` is units step_offsets[s]..step_offsets[s + 1], unit `u` likewise rows of row_ids."""

    row_ids: Integer[ndarray, "n"]
    unit_offsets: Int64[ndarray, "unit_ends"]  # U + 1
    step_offsets: Int64[ndarray, "step_ends"]  # M + 1, in units
    epoch: int

    @property
    def num_steps(self) -> int:
        return self.step_offsets.size - 1

    def step(self, index: int) -> list[Integer[ndarray, "B"]]:
        """Rows of each unit of one step."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of epoch {self.epoch}: expected 0..{self.num_steps - 1}")
        bounds = self.unit_offsets[self.step_offsets[index] : self.step_offsets[index + 1] + 1].tolist()
        return [self.row_ids[start:stop] for start, stop in pairwise(bounds)]


def plan_epoch(
    tokens: Integer[ndarray, "R"],
    slots: Integer[ndarray, "R"],
    row_ids: Integer[ndarray, "n"],
    *,
    tokens_per_step: int,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """Plan one epoch over `row_ids`, rows of so many context tokens and slots."""
    if not row_ids.size:
        return EpochPlan(row_ids, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), epoch)
    # Raw words of the counter-based generator: numpy promises that they never change, unlike Generator.permutation.
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    rows = row_ids[_shuffled(random, row_ids.size)]
    rows_per_group = max(1.0, min(tokens_per_step, GROUP_TOKENS) / max(1.0, float(tokens[rows].mean())))
    size = round(min(WINDOW_GROUPS * rows_per_group, max(rows_per_group, rows.size / MIN_WINDOWS)))
    rows = rows[_neighbours(tokens[rows], slots[rows], size)]
    length = tokens[rows]
    first = _first_rows(length, size, tokens_per_step)

    # Groups in shuffled order, then their units, then steps of whole groups.
    count = np.diff(np.append(first, rows.size))
    chosen = _shuffled(random, first.size)
    group_tokens = np.add.reduceat(length, first)[chosen]
    first, count = first[chosen], count[chosen]
    offsets = offsets_of(count)
    rows = rows[np.repeat((first - offsets[:-1]).astype(np.int32), count) + np.arange(rows.size, dtype=np.int32)]
    units = np.minimum(count, UNITS)
    place = np.arange(int(units.sum())) - np.repeat(offsets_of(units)[:-1], units)  # of a unit in its group
    starts = np.repeat(offsets[:-1], units) + place * np.repeat(count, units) // np.repeat(units, units)
    ends = np.cumsum(group_tokens)
    steps = max(1, round(int(ends[-1]) / tokens_per_step))
    step = ((2 * ends - group_tokens) * steps) // (2 * int(ends[-1]))  # the one that holds the group's middle
    firsts = np.flatnonzero(np.diff(step, prepend=-1))
    return EpochPlan(rows, np.append(starts, rows.size), np.append(offsets_of(units)[firsts], starts.size), epoch)


def _shuffled(random: np.random.Philox, count: int) -> Int32[ndarray, "n"]:
    return _ascending((random.random_raw(count) >> np.uint64(32)).astype(np.uint32))


def _ascending(keys: Integer[ndarray, "n"]) -> Int32[ndarray, "n"]:
    """Order of non-negative keys, equal ones as they stand: 16 bits at a time, which numpy sorts by radix."""
    order = np.argsort(keys.astype(np.uint16), kind="stable").astype(np.int32)
    while (keys := keys >> 16).any():
        order = order[np.argsort(keys.astype(np.uint16)[order], kind="stable")]
    return order


def _neighbours(tokens: Integer[ndarray, "n"], slots: Integer[ndarray, "n"], size: int) -> Int32[ndarray, "n"]:
    """An order in which rows that stand side by side in a window have about as many slots, and about as many tokens.

    A window is sorted by slots, then tokens, and cut into bands; each band is sorted by tokens, there and back.
    """
    shorter = (int(tokens.max()) - tokens).astype(np.int32)
    order = _ascending(shorter)
    order = order[_ascending((int(slots.max()) - slots)[order])]
    order = order[_ascending(order // size)]
    place, band_rows = np.arange(order.size, dtype=np.int32), max(1, round(size**0.5))
    band = place // size * -(-size // band_rows) + place % size // band_rows
    inside = _ascending(np.where(band % 2, tokens[order], shorter[order]))
    neighbours: ndarray = order[inside[_ascending(band[inside])]]
    return neighbours


def _first_rows(length: Integer[ndarray, "n"], size: int, tokens_per_step: int) -> Int64[ndarray, "G"]:
    """Index of each group's first row, where windows of `size` rows lie in the order of `_neighbours`."""
    # As many rows as tokens_per_step has: a multiple of UNITS where there are about so many, else a power of two.
    lengths = np.maximum(1, np.arange(int(length.max()) + 1))
    many = tokens_per_step / lengths
    in_units = UNITS * np.maximum(1, np.rint(np.minimum(many, GROUP_TOKENS / lengths) / UNITS))
    powers = 1 << np.searchsorted([2**0.5, 2**1.5], many, side="right")
    count = np.minimum(np.where(many >= 2**2.5, in_units, powers), length.size).astype(np.int32)
    rows = np.arange(length.size, dtype=np.int32)
    end = np.minimum((rows // size + 1) * size, length.size)
    following = np.minimum(rows + count[length], end)
    # All windows step to their next group at once, until none has one.
    starts, cuts = rows[::size], []
    stops = end[starts]
    while starts.size:
        cuts.append(starts)
        starts = following[starts]
        within = starts < stops
        starts, stops = starts[within], stops[within]
    return np.sort(np.concatenate(cuts)).astype(np.int64)
