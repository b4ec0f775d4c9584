"""Where blocks start, what their slots should predict, and how much each slot counts. numpy, pure."""

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Integer, UInt8
from numpy import ndarray

LENGTH_BINS = 24  # of rows: bin i holds lengths in (2^(i−1), 2^i], the last one whatever is longer, too

_READ_TOKENS = 1 << 24  # of a mask at once
_ANCHORS = 1  # counter word that keeps a row's anchors apart from the epoch's permutation


def legal_anchors(mask: UInt8[ndarray, " T"]) -> Bool[ndarray, " T"]:
    """Positions of one row where a block may start.

    A position is legal when its own token and the next one are supervised: slot 0 shows the anchor's token, slot 1 is
    the first that is predicted (arXiv 2602.06036, section 3).
    """
    supervised = mask.astype(bool)
    legal = np.zeros(supervised.size, dtype=bool)
    legal[:-1] = supervised[:-1] & supervised[1:]
    return legal


def count_legal(mask: UInt8[ndarray, " T"], offsets: Int64[ndarray, " R+1"]) -> Int32[ndarray, " R"]:
    """Legal anchors of every row of a token cache, read once from front to back."""
    counts = np.zeros(offsets.size - 1, dtype=np.int32)
    cuts = np.searchsorted(offsets, np.arange(0, int(offsets[-1]), _READ_TOKENS))  # of rows that are read together
    for first, last in pairwise(np.unique([*cuts, offsets.size - 1]).tolist()):
        start, stop = int(offsets[first]), int(offsets[last])
        supervised = mask[start:stop].astype(bool)
        legal = supervised.copy()
        legal[:-1] &= supervised[1:]
        legal[offsets[first + 1 : last + 1] - 1 - start] = False  # the last token of a row has no next one
        counts[first:last] = np.add.reduceat(legal, offsets[first:last] - start, dtype=np.int32)
    return counts


def num_drawn(legal: Integer[ndarray, " *R"], anchors: int | float) -> Integer[ndarray, " *R"]:
    """How many anchors are drawn of so many legal ones: at most a number, or a share of them, at least one."""
    wanted = np.maximum(1, np.rint(anchors * legal)).astype(legal.dtype) if isinstance(anchors, float) else anchors
    drawn: Integer[ndarray, " *R"] = np.minimum(legal, wanted)
    return drawn


def draw_anchors(
    mask: UInt8[ndarray, " T"], *, anchors: int | float, seed: int, epoch: int, row: int
) -> Int64[ndarray, " A"]:
    """Legal positions of one row, ascending, without replacement: at most a number, or a share of them.

    Depends on (seed, epoch, row) alone, so that regrouping rows into batches changes no anchor.
    """
    positions = np.flatnonzero(legal_anchors(mask))
    size = int(num_drawn(np.array(positions.size), anchors))
    if size == positions.size:
        return positions
    # Each position has a raw word of the counter-based generator, and those with the smallest are drawn: numpy promises
    # that these words never change, unlike Generator.choice.
    words = np.random.Philox(key=[seed, epoch], counter=[0, 0, row, _ANCHORS]).random_raw(positions.size)
    largest = np.partition(words, size - 1)[size - 1]
    drawn: Int64[ndarray, " A"] = positions[words <= largest][:size]
    return drawn


def covered_tokens(mask: UInt8[ndarray, " T"], anchor: Int64[ndarray, " A"], block_size: int) -> Bool[ndarray, " T"]:
    """Which tokens of one row some counted slot predicts: coverage is their share of the supervised ones."""
    positions = anchor[:, None] + np.arange(block_size)
    covered = np.zeros(mask.size, dtype=bool)
    covered[positions[block_counts(mask, anchor, block_size)]] = True
    return covered


def length_bin(length: int) -> int:
    """Which bin a row of this length belongs to."""
    return min((length - 1).bit_length(), LENGTH_BINS - 1)


def block_labels(ids: Int32[ndarray, " T"], anchor: Int64[ndarray, " A"], block_size: int) -> Int32[ndarray, "A K"]:
    """Token at anchor + k for every slot k; 0 past the end of the row. Slot 0 is the anchor's own token."""
    positions = anchor[:, None] + np.arange(block_size)
    inside = positions < ids.size
    return np.where(inside, ids[np.minimum(positions, ids.size - 1)], 0).astype(np.int32)


def block_counts(mask: UInt8[ndarray, " T"], anchor: Int64[ndarray, " A"], block_size: int) -> Bool[ndarray, "A K"]:
    """Which slots count: slot k ≥ 1 does while every token anchor+1 … anchor+k exists and is supervised."""
    slots = np.arange(block_size)
    ends = np.append(np.flatnonzero(mask == 0), mask.size)  # where a run of supervised tokens ends
    left = ends[np.searchsorted(ends, anchor + 1)] - anchor  # slots before the first that does not count
    counts: Bool[ndarray, "A K"] = (slots >= 1) & (slots < left[:, None])
    return counts


def default_gamma(block_size: int) -> float:
    """γ of the paper for K = 16, 10, 8 (7, 5, 4); between and beyond them on the line through its neighbours."""
    if block_size <= 10:
        return max(1.0, 4.0 + (block_size - 8) / 2.0)
    return 5.0 + (block_size - 10) / 3.0


def slot_weights(block_size: int, gamma: float) -> Float32[ndarray, " K"]:
    """w_k = exp(−(k−1)/γ) for k ≥ 1 and 0 for slot 0 (arXiv 2602.06036, equation 4)."""
    weights = np.exp(-(np.arange(block_size) - 1) / gamma)
    weights[0] = 0.0
    return weights.astype(np.float32)
