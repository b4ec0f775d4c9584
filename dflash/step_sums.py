"""What a step adds up over its passes and processes, and how it reaches the host without a wait."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dflash.anchors import LENGTH_BINS
from dflash.batch import Step, StepReport, TrainBatch


class StepSums:
    """Sums of one step, float64, as views of one vector: a single call adds it up over all processes.

    loss            Σ w·CE                     weight          Σ w
    stop            processes asked to stop    tokens, padded  of the rows, without and with padding
    slots, padded_slots  likewise              right, counted  slots by their place in the block
    covered, supervised  tokens by bin of row lengths
    """

    def __init__(self, vector: Float[Tensor, " n"], slots: int) -> None:
        sizes = {"loss": 1, "weight": 1, "stop": 1, "tokens": 1, "padded": 1, "slots": 1, "padded_slots": 1}
        sizes |= {"covered": LENGTH_BINS, "supervised": LENGTH_BINS, "right": slots, "counted": slots}
        self.vector, self.slots = vector, slots
        self._views: dict[str, Tensor] = dict(zip(sizes, torch.split(vector, list(sizes.values())), strict=True))
        self._from_host = vector[3 : 7 + 2 * LENGTH_BINS]  # from tokens to supervised: one copy

    @classmethod
    def zeros(cls, slots: int, device: torch.device) -> "StepSums":
        """Those of a step that has not begun."""
        return cls(torch.zeros(7 + 2 * LENGTH_BINS + 2 * slots, dtype=torch.float64, device=device), slots)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def add(self, loss: Tensor, weight: Tensor, right: Tensor, counted: Tensor, batch: TrainBatch) -> None:
        """One pass: Σ w·CE and Σ w, `right` and `counted` slots by place, and the counts of its rows."""
        sizes = (batch.tokens, batch.padded, batch.slots, batch.padded_slots)
        counts = torch.tensor([*sizes, *batch.coverage.ravel().tolist()], dtype=torch.float64)
        if self.vector.device.type == "cuda":
            counts = counts.pin_memory().to(self.vector.device, non_blocking=True)
        self["loss"].add_(loss.detach())
        self["weight"].add_(weight)
        self._from_host.add_(counts)
        self["right"].add_(right)
        self["counted"].add_(counted)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """What a step did, on its way from the device."""

    at: Step
    lr: float
    slots: int
    values: Tensor  # of StepSums, then gradient norm and whether the step was skipped; complete once `copied` happened
    copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, at: Step, lr: float, sums: StepSums, norm: Tensor, skipped: Tensor) -> "PendingReport":
        """Start the copy to the host."""
        values = torch.cat([sums.vector, torch.stack([norm.double(), skipped.double()])])
        if values.device.type != "cuda":
            return cls(at, lr, sums.slots, values)
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(at, lr, sums.slots, host, copied)

    def report(self) -> StepReport:
        """Wait for the values, if need be."""
        if self.copied is not None:
            self.copied.synchronize()
        sums, (norm, skipped) = StepSums(self.values[:-2], self.slots), self.values[-2:].tolist()
        return StepReport(
            epoch=self.at.epoch,
            step=self.at.step,
            steps_in_epoch=self.at.steps_in_epoch,
            loss_sum=sums["loss"].item(),
            weight_sum=sums["weight"].item(),
            correct_by_slot=tuple(sums["right"].tolist()),
            counted_by_slot=tuple(sums["counted"].tolist()),
            covered_by_length=tuple(sums["covered"].tolist()),
            supervised_by_length=tuple(sums["supervised"].tolist()),
            tokens=int(sums["tokens"].item()),
            padded=int(sums["padded"].item()),
            slots=int(sums["slots"].item()),
            padded_slots=int(sums["padded_slots"].item()),
            lr=self.lr,
            grad_norm=norm,
            skipped=bool(skipped),
            stop=sums["stop"].item() > 0,
        )
