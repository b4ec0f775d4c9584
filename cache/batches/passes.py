"""How a process walks through its rows of a step: which units it takes, and how many rows run at once.

Both change no sum beyond rounding, so they may change on every start.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer
from numpy import ndarray

PADDING = 0.02  # of a pass at most, of tokens and of slots each, where it has enough to do without another row
ENOUGH = 8192  # tokens and slots: a smaller pass costs about as much as one of these


@dataclass(frozen=True, slots=True)
class PassRoom:
    """What one pass may have, padding included. A larger row is a pass of its own."""

    tokens: int  # B·S
    slots: int  # B·A·K


def deal(cost: Float[ndarray, "U"] | Sequence[float], processes: int) -> list[list[int]]:
    """Units for each process, so that the most loaded one has about the least: the dearest first, to whom has least."""
    loads = [(0.0, process) for process in range(processes)]
    dealt: list[list[int]] = [[] for _ in range(processes)]
    for unit in np.argsort(-np.asarray(cost), kind="stable").tolist():
        load, process = heapq.heappop(loads)
        dealt[process].append(unit)
        heapq.heappush(loads, (load + float(cost[unit]), process))
    return [sorted(units) for units in dealt]


def cut_passes(
    row_ids: Integer[ndarray, "n"], tokens: Integer[ndarray, "R"], slots: Integer[ndarray, "R"], room: PassRoom
) -> list[Integer[ndarray, "B"]]:
    """These rows in passes that fit the room, longest first.

    A pass also ends where the next row would make more than PADDING of it padding, if it has ENOUGH by itself.
    """
    order = row_ids[np.lexsort((-slots[row_ids], -tokens[row_ids]))]
    passes = []
    start = sum_tokens = sum_slots = longest = most = 0
    sizes = zip(tokens[order].tolist(), slots[order].tolist(), strict=True)
    for place, (row_tokens, row_slots) in enumerate(sizes):
        rows = place - start + 1
        longest, most = max(longest, row_tokens), max(most, row_slots)
        padded_tokens, padded_slots = rows * longest, rows * most
        fits = padded_tokens <= room.tokens and padded_slots <= room.slots
        is_even = (sum_tokens + row_tokens) >= (1 - PADDING) * padded_tokens and (
            (sum_slots + row_slots) >= (1 - PADDING) * padded_slots
        )
        if rows > 1 and not (fits and (is_even or sum_tokens + sum_slots < ENOUGH)):
            passes.append(order[start:place])
            start, sum_tokens, sum_slots, longest, most = place, 0, 0, row_tokens, row_slots
        sum_tokens, sum_slots = sum_tokens + row_tokens, sum_slots + row_slots
    if order.size:
        passes.append(order[start:])
    return passes
