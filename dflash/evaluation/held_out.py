"""Teacher-forced τ of drafters on held-out rows: as many as the answer needs, dealt among the processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from torch import nn

from cache.disk.store import TokenCache
from dflash.decoding.tau import RowWalk, tau, walk_rows
from dflash.distributed import ALONE, Ranks
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.target.frozen import Target

MOST_ROWS = 1000
STANDARD_ERROR = 0.01  # of the first drafter's τ, below which more rows say nothing new
_ROUND = 64  # rows between two looks at the error


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rows that were walked, and the passes over each, for each drafter."""

    row_ids: Int64[ndarray, " R"]
    walks: list[list[RowWalk]]


def walk_held_out(
    store: TokenCache,
    rows: int | None,
    seed: int,
    target: Target,
    ends: tuple[nn.Module, Head],
    drafters: Sequence[Drafter],
    *,
    ranks: Ranks = ALONE,
    on_row: Callable[[int], None] = lambda done: None,
) -> HeldOut:
    """Walk held-out rows in an order that `seed` draws: `rows` of them, or until the error is small enough.

    Rounds have one size whatever the number of processes, so the rows do not depend on it. `on_row` hears how many are
    done, over all processes.
    """
    order = np.random.default_rng(seed).permutation(store.rows(1))[: most_rows(store, rows)]
    walks: list[list[RowWalk]] = [[] for _ in drafters]
    done = 0

    def walked() -> None:
        nonlocal done
        done = min(done + ranks.size, order.size)
        on_row(done)

    for start in range(0, order.size, _ROUND):
        these = order[start : start + _ROUND]
        mine = these[ranks.rank :: ranks.size]
        found = walk_rows(store, mine, target, ends, drafters, on_row=walked) if mine.size else [[] for _ in drafters]
        done = start + these.size
        parts = ranks.gather(found)
        for number, all_walks in enumerate(walks):
            all_walks += [parts[place % ranks.size][number][place // ranks.size] for place in range(these.size)]
        if rows is None and tau(walks[0]).standard_error < STANDARD_ERROR:
            break
    return HeldOut(order[:done], walks)


def most_rows(store: TokenCache, rows: int | None) -> int:
    """As many rows as may be walked."""
    return min(int(store.rows(1).size), MOST_ROWS if rows is None else rows)
