"""One optimizer step: Σ w·CE and its gradient over the micro-batches, divided by Σ w of the whole step, then clipped.

A mean of micro-batch means would weigh a micro-batch with few counted slots as much as a full one. Sums go over the
micro-batches of all processes. Nothing here waits for the device: what a step did is read from a PendingReport.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash.anchors import LENGTH_BINS
from dflash.batch import FeatureBatch, Step, StepReport
from dflash.config import TrainingConfig
from dflash.drafter import Drafter
from dflash.loss import BlockLoss, Head, LossKind, block_loss, label_states
from dflash.pipeline.ranks import ALONE, Ranks
from dflash.schedule import learning_rate, progress

_ALIGN = 16  # elements: each parameter's gradient starts where vector instructions can read it
# A step's sums: Σ w·CE, Σ w, processes that were asked to stop; then counts: tokens, padded tokens, covered and
# supervised tokens by length of row; then by slot: right and counted slots.
_COUNTS = 3
_BY_SLOT = _COUNTS + 2 + 2 * LENGTH_BINS


class Trainer:
    """The drafter, its optimizer, and the sums of the step that is under way."""

    def __init__(
        self,
        drafter: Drafter,
        embedding: nn.Module,
        head: Head,
        config: TrainingConfig,
        ranks: Ranks = ALONE,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.drafter = drafter.train()
        self.embedding = embedding
        self.head = head
        self.config = config
        self.device = drafter.fc.weight.device
        self.parameters = dict(drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._ranks, self._stop_asked = ranks, stop_asked
        self._slots = drafter.shape.block_size
        self._gradient = flat_gradient(list(self.parameters.values()))
        self._sums = torch.zeros(_BY_SLOT + 2 * self._slots, dtype=torch.float64, device=self.device)

    def accumulate(self, item: FeatureBatch) -> None:
        """Add the gradient of one micro-batch's Σ w·CE."""
        batch = item.batch
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = forward_loss(self.drafter, self.embedding, self.head, item, self.config.loss)
        if loss.total.requires_grad:
            loss.total.backward()  # type: ignore[no-untyped-call]
        counts = torch.tensor([batch.tokens, batch.padded, *batch.coverage.ravel().tolist()], dtype=torch.float64)
        if self.device.type == "cuda":
            counts = counts.pin_memory().to(self.device, non_blocking=True)
        facts = [loss.total.detach(), loss.weight]
        self._sums[:2] += torch.stack(facts).double()
        self._sums[_COUNTS:_BY_SLOT] += counts
        self._sums[_BY_SLOT:] += torch.cat([loss.correct_by_slot, loss.counted_by_slot])

    def forget(self) -> None:
        """Drop what has been accumulated since the last step."""
        self._gradient.zero_()
        self._sums.zero_()

    def step(self, at: Step) -> "PendingReport":
        """Divide, clip, update. A step with Σ w = 0, or whose loss or gradient is not finite, changes nothing."""
        config = self.config
        done = progress(at.epoch, at.step, at.steps_in_epoch, config.epochs)
        lr = learning_rate(done, peak=config.lr, floor=config.min_lr, warmup=config.warmup)
        self._sums[2] = float(self._stop_asked())
        self._ranks.add(self._gradient, self._sums)
        loss, weight = self._sums[0], self._sums[1]
        self._gradient.div_(weight)  # gradients of Σ w·CE become those of Σ w·CE / Σ w
        norm = torch.linalg.vector_norm(self._gradient)
        self._gradient.mul_((config.clip / (norm + 1e-6)).clamp(max=1.0))
        skipped = ~(torch.isfinite(loss) & torch.isfinite(norm) & (weight > 0))
        # The optimizer's kernels look at it, so the host need not: 1 leaves weights, moments and step counts alone.
        self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        values = torch.cat([self._sums, torch.stack([norm.double(), skipped.double()])])
        self.forget()
        return PendingReport.of(at, lr, values)

    @property
    def claim_bytes(self) -> int:
        """Memory that the optimizer takes with its first step: two moments a weight."""
        held = sum(2 * parameter.numel() * parameter.element_size() for parameter in self.drafter.parameters())
        return 0 if self.optimizer.state else held

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts by parameter name, for a checkpoint."""
        tensors = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `optimizer_tensors`."""
        for name, parameter in self.parameters.items():
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            if keys:
                self.optimizer.state[parameter] = {
                    key: tensors[f"{key}.{name}"].to(parameter.device, copy=True) for key in keys
                }


@dataclass(frozen=True, slots=True)
class PendingReport:
    """What a step did, on its way from the device."""

    at: Step
    lr: float
    values: Tensor  # on the host, complete once `copied` has happened
    copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, at: Step, lr: float, values: Tensor) -> "PendingReport":
        """Start the copy to the host."""
        if values.device.type != "cuda":
            return cls(at, lr, values)
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(at, lr, host, copied)

    def report(self) -> StepReport:
        """Wait for the values, if need be."""
        if self.copied is not None:
            self.copied.synchronize()
        *values, norm, skipped = self.values.tolist()
        loss, weight, stop = values[:_COUNTS]
        tokens, padded, *by_length = values[_COUNTS:_BY_SLOT]
        by_slot = values[_BY_SLOT:]
        slots = len(by_slot) // 2
        return StepReport(
            epoch=self.at.epoch,
            step=self.at.step,
            steps_in_epoch=self.at.steps_in_epoch,
            loss_sum=loss,
            weight_sum=weight,
            correct_by_slot=tuple(by_slot[:slots]),
            counted_by_slot=tuple(by_slot[slots:]),
            covered_by_length=tuple(by_length[:LENGTH_BINS]),
            supervised_by_length=tuple(by_length[LENGTH_BINS:]),
            tokens=int(tokens),
            padded=int(padded),
            lr=self.lr,
            grad_norm=norm,
            skipped=bool(skipped),
            stop=stop > 0,
        )


def flat_gradient(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that holds the gradients of all parameters: summed over processes, scaled and measured at once."""
    starts, size = [], 0
    for parameter in parameters:
        starts.append(size)
        size += -(-parameter.numel() // _ALIGN) * _ALIGN
    flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
    return flat


def forward_loss(
    drafter: Drafter, embedding: nn.Module, head: Head, item: FeatureBatch, kind: LossKind = "ce"
) -> BlockLoss:
    """Σ w·loss of one micro-batch, from features to loss. For `kl`, features end with the target's final state."""
    batch, width = item.batch, drafter.fc.in_features
    with torch.no_grad():
        embedded = embed_blocks(embedding, batch.labels[..., 0], drafter.shape.block_size, drafter.shape.mask_token_id)
    hidden = drafter(item.features[..., :width], embedded.to(drafter.fc.weight.dtype), batch.anchor)
    states = None
    if kind == "kl":
        states = label_states(item.features[..., width:], batch.anchor, drafter.shape.block_size)
    return block_loss(hidden, head, batch.labels, batch.weights, kind, states, batch.counted)


def embed_blocks(embedding: nn.Module, anchor_token: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Embeddings of blocks `[anchor's token, mask, …, mask]`: `[…, K, H]` for anchor tokens `[…]`."""
    block = torch.full((*anchor_token.shape, block_size), mask_token_id, device=anchor_token.device)
    block[..., 0] = anchor_token
    embedded: Tensor = embedding(block)
    return embedded
