"""Spans of text → tokens, for a whole batch at once: which are supervised, and where an unfinished row is cut."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt8
from numpy import ndarray

from cache.chat.token_places import Encoded


@dataclass(frozen=True, slots=True)
class AnswerSpans:
    """Supervised answers of a batch, in order: the row of each, its bytes, and whether a limit cut it."""

    row: Int64[ndarray, "N"]
    start: Int64[ndarray, "N"]  # counted like `Encoded.start`; the end of turn is not in it
    end: Int64[ndarray, "N"]
    unfinished: Bool[ndarray, "N"]


@dataclass(frozen=True, slots=True)
class Supervision:
    mask: UInt8[ndarray, "T"]
    keep: Bool[ndarray, "T"]  # False after the last token of an unfinished answer
    without_end: Int64[ndarray, "n"]  # answers with no end of turn after them, though they are finished


def supervise(encoded: Encoded, answers: AnswerSpans, is_stop: Bool[ndarray, "V"]) -> Supervision:
    """Each answer from its first token to its end of turn, the first stop id after it, and nothing after that.

    A token that straddles the start of an answer is not in it. An unfinished answer ends with the last token that is
    wholly its own, and so does its row: the end of turn that the template writes there was never the target's.
    """
    num_tokens = encoded.ids.size
    first = np.searchsorted(encoded.start, answers.start, side="left")
    own = np.maximum(np.searchsorted(encoded.end, answers.end, side="right"), first)  # one past its last token
    stops = np.append(np.flatnonzero(is_stop[encoded.ids]), num_tokens)
    stop = stops[np.searchsorted(stops, first)]
    # An end of turn is looked for up to the next answer of the row, or to the end of the row.
    last_of_row = np.append(answers.row[1:] != answers.row[:-1], True)[: answers.row.size]
    limit = np.where(last_of_row, encoded.offsets[answers.row + 1], np.append(first[1:], num_tokens)[: first.size])
    has_stop = stop < limit
    end = np.where(has_stop & ~answers.unfinished, stop + 1, np.minimum(own, stop))
    cut = answers.unfinished
    lost = _inside(num_tokens, end[cut], encoded.offsets[answers.row[cut] + 1])
    return Supervision(
        _inside(num_tokens, first, end).view(np.uint8),
        ~lost,
        np.flatnonzero(last_of_row & ~has_stop & ~answers.unfinished),
    )


def _inside(size: int, start: Int64[ndarray, "n"], end: Int64[ndarray, "n"]) -> Bool[ndarray, "T"]:
    """Positions in any of `start[i]..end[i]`: +1 where one begins, −1 where it ends, and the running sum."""
    edges = np.zeros(size + 1, dtype=np.int8)
    np.add.at(edges, start, 1)
    np.subtract.at(edges, end, 1)
    inside: ndarray = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
    return inside
