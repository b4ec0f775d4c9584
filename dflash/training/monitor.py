"""τ while a run trains: on a few held-out rows, between two steps, from features computed once at the start.

Several processes deal the rows among them, so that none waits for one that evaluates alone.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from dflash.decoding.tau import RowWalk, Tau, tau, walk_rows
from dflash.distributed import ALONE, Ranks
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.target.frozen import Target
from dflash.training.open_run import OpenRun

_ROWS = 16  # their features stay in the host's memory


class Monitor:
    """Draws nothing and changes nothing, so that a run with it is the run without it."""

    def __init__(self, opened: OpenRun, target: Target, ends: tuple[nn.Module, Head], ranks: Ranks = ALONE) -> None:
        held_out = opened.store.rows(1)
        chosen = np.random.default_rng(opened.config.evaluation.seed).permutation(held_out)[:_ROWS]
        self._rows = np.sort(chosen)[ranks.rank :: ranks.size]
        self._opened, self._ends, self._ranks = opened, ends, ranks
        width = len(opened.shape.taps) * opened.shape.hidden_size  # without the final state that a loss may need
        self._replay = _Replay(lambda ids: target.features(ids)[..., :width], target.device)
        self._walk([])

    def tau(self, drafter: Drafter) -> Tau:
        """τ of the drafter as it is now, the same on every process; nan without held-out rows."""
        drafter.eval()
        try:
            with torch.autocast(
                drafter.fc.weight.device.type, torch.bfloat16, self._opened.config.target.dtype == "bfloat16"
            ):
                walked = self._walk([drafter])[0]
        finally:
            drafter.train()
        parts = self._ranks.gather(dict(zip(self._rows.tolist(), walked, strict=True)))
        walks = {row: walk for part in parts for row, walk in part.items()}
        return tau([walks[row] for row in sorted(walks)])

    def _walk(self, drafters: list[Drafter]) -> list[list[RowWalk]]:
        self._replay.rewind()
        target = cast("Target", self._replay)
        return walk_rows(self._opened.store, self._rows, target, self._ends, drafters)


class _Replay:
    """A target that computes the features of each pass once, and gives them again in the same order."""

    def __init__(self, features: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.device = device
        self._features = features
        self._kept: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def features(self, ids: Tensor) -> Tensor:
        if self._next == len(self._kept):
            self._kept.append(self._features(ids).cpu())
        self._next += 1
        return self._kept[self._next - 1]
