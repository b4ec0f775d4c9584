"""What travels between the stages.

Dimensions: B rows, S padded length, A anchors a row, K slots of a block, N taps, H hidden size, V vocabulary,
L bins of row lengths (`dflash/anchors.py`).
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Float32, Int32, Int64
from numpy import ndarray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: its place in the plan, and in how many passes this process computes its rows of it."""

    epoch: int
    step: int  # in the epoch
    steps_in_epoch: int
    num_passes: int  # other processes have other rows, so there may be none


@dataclass(frozen=True, slots=True)
class Position:
    """Where a pass stands: epoch, step in the epoch, pass of this process in the step."""

    epoch: int
    step: int
    index: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The rows of one pass: a pure function of (token cache, parameters, seed, epoch, rows)."""

    position: Position
    row_ids: Int64[ndarray, " B"]
    ids: Int32[Tensor, "B S"]
    lengths: Int32[ndarray, " B"]
    anchor: Int32[Tensor, "B A"]
    labels: Int32[Tensor, "B A K"]
    weights: Float32[Tensor, "B A K"]
    counted: Int64[Tensor, " n"]  # flat numbers of the slots with a weight
    slots: int  # of anchors that were drawn
    coverage: Int64[ndarray, "2 L"]  # by length of row: supervised tokens that a block covered, and all

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def padded(self) -> int:
        """B·S."""
        return self.lengths.size * int(self.lengths.max())

    @property
    def padded_slots(self) -> int:
        """B·A·K."""
        return self.labels.numel()


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """The rows of a pass and the target's features of it, on the drafter's device.

    Its ids are gone: they lay in leased memory, which has been given back.
    """

    batch: TrainBatch
    features: Float[Tensor, "B S N*H"]
    ready: Any = None  # the event on the device that says so; None on the CPU


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, over all processes. `loss_sum` is Σ w·CE, `weight_sum` is Σ w."""

    epoch: int
    step: int
    steps_in_epoch: int
    loss_sum: float
    weight_sum: float
    correct_by_slot: tuple[float, ...]
    counted_by_slot: tuple[float, ...]
    covered_by_length: tuple[float, ...]  # tokens, by bin of row lengths
    supervised_by_length: tuple[float, ...]
    tokens: int
    padded: int
    slots: int
    padded_slots: int
    lr: float
    grad_norm: float
    skipped: bool  # no slot counted, or loss or gradient not finite: nothing was changed
    stop: bool = False  # some process was asked to stop

    @property
    def loss(self) -> float:
        """Σ w·CE / Σ w; nan when no slot counted."""
        return self.loss_sum / self.weight_sum if self.weight_sum > 0 else float("nan")
