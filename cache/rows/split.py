"""Which rows are held out: drawn by how the conversation begins, so that all of its rows are on one side."""

import logging
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8, UInt64
from numpy import ndarray

from cache.errors import BadSource
from cache.ragged import Spans
from cache.source.first_text import SALT

logger = logging.getLogger(__name__)

MANY = 1000  # different beginnings
SAMPLES = 16  # ids of a row that came tokenised, by which its side is drawn


def hashes_of_ids(ids: Spans) -> UInt64[ndarray, "R"]:
    """A hash of each row's length and of `SAMPLES` ids spread over it.

    A few ids and not all: hashing every token would cost as much as the conversion. Spread over the row and not its
    front: rows often begin with the same long instruction. Equal rows are on one side, which is what a split is for.
    """
    at = ids.start[:, None] + ids.length[:, None] * np.arange(SAMPLES) // SAMPLES
    odd = np.arange(SAMPLES, dtype=np.uint64) * np.uint64(2 * SALT % 2**64) + np.uint64(SALT)  # another factor a place
    words = (ids.values[at].astype(np.int64).view(np.uint64) + np.uint64(1)) * odd
    hashes = (words ^ (words >> np.uint64(29))).sum(axis=1, dtype=np.uint64)
    return _mix(hashes + ids.length.astype(np.uint64))


@dataclass(slots=True)
class Balance:
    """How many rows came to each side, and how many different beginnings they had."""

    rows: int = 0
    held_out: int = 0
    _beginnings: set[int] = field(default_factory=set)

    def meet(self, hashes: UInt64[ndarray, "R"]) -> None:
        if len(self._beginnings) <= MANY:  # beyond that the exact number says nothing more
            self._beginnings.update(np.unique(hashes).tolist())

    def add(self, side: UInt8[ndarray, "R"]) -> None:
        self.rows += side.size
        self.held_out += int(side.sum())

    def refuse(self, source: str, held_out: float) -> None:
        """An evaluation on no rows is found here, not after the training; one on too few or too many is said."""
        problem = self.problem(held_out)
        if problem is None:
            return
        what, is_worthless = problem
        if is_worthless:
            raise BadSource(
                f"{source}: {what}. Give rows that begin differently, or set rows.held_out=0 and evaluate on others."
            )
        logger.warning("%s: %s.", source, what)

    def problem(self, held_out: float) -> tuple[str, bool] | None:
        """What is wrong with the split, and whether it is worth nothing; None where it is as asked.

        Rows are drawn by their beginnings. Where all of them differ, the number held out is within 5 standard
        deviations of its mean in all but one of two million builds; a side on which 10 rows or more are expected is
        empty once in 20,000 (e^-10).
        """
        expected = self.rows * held_out
        is_empty = self.held_out in (0, self.rows) and min(expected, self.rows - expected) >= 10
        is_far = abs(self.held_out - expected) > 5 * max(1.0, (expected * (1 - held_out)) ** 0.5)
        if not held_out or not (is_empty or is_far):
            return None
        found = len(self._beginnings)
        different = f"more than {MANY:,}" if found > MANY else f"{found:,}"
        return (
            f"{self.held_out:,} of {self.rows:,} rows are held out, where rows.held_out={held_out:g} asks for about "
            f"{expected:,.0f}: they begin with {different} different texts, "
            "and rows that begin alike (system and first user text) stay on one side",
            is_empty,
        )


def sides(hashes: UInt64[ndarray, "R"], held_out: float) -> UInt8[ndarray, "R"]:
    """0 train, 1 held out."""
    # Compared in 53 bits, where a float is exact: hash < held_out · 2⁶⁴.
    return ((hashes >> np.uint64(11)).astype(np.float64) < held_out * 2.0**53).astype(np.uint8)


def _mix(words: ndarray) -> ndarray:
    """The finaliser of splitmix64, on many words at once."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: ndarray = words ^ (words >> np.uint64(31))
    return mixed
