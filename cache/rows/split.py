"""Which rows are held out: drawn by how the conversation begins, so that all of its rows are on one side."""

import numpy as np
from jaxtyping import UInt8, UInt64
from numpy import ndarray

from cache.ragged import Spans
from cache.source.first_text import SALT

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
