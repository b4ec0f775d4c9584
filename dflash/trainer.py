"""One optimizer step: Σ w·CE and its gradient over the micro-batches, divided by Σ w of the whole step, then clipped.

A mean of micro-batch means would weigh a micro-batch with few counted slots as much as a full one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash.batch import FeatureBatch, StepReport
from dflash.config import TrainingConfig
from dflash.drafter import Drafter
from dflash.errors import StageFailed
from dflash.loss import BlockLoss, Head, block_loss
from dflash.schedule import learning_rate, progress

MAX_BAD_STEPS = 10  # not-finite steps in a row after which the run ends


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the micro-batches of the step so far, on the drafter's device: nothing waits for them."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    counted: Tensor
    tokens: int


class Trainer:
    """The drafter, its optimizer, and the sums of the step that is under way."""

    def __init__(self, drafter: Drafter, embedding: nn.Module, head: Head, config: TrainingConfig) -> None:
        self.drafter = drafter.train()
        self.embedding = embedding
        self.head = head
        self.config = config
        self.device = drafter.fc.weight.device
        self.parameters = dict(drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self.bad_steps = 0  # not-finite steps in a row
        self._sums: _Sums | None = None

    def accumulate(self, item: FeatureBatch) -> None:
        """Add the gradient of one micro-batch's Σ w·CE."""
        batch = item.batch
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = forward_loss(self.drafter, self.embedding, self.head, item)
        if loss.total.requires_grad:
            loss.total.backward()  # type: ignore[no-untyped-call]
        self._sums = _add(self._sums, loss, batch.tokens)

    def step(self, epoch: int, step: int, steps_in_epoch: int) -> StepReport:
        """Divide, clip, update. A step with Σ w = 0 or a gradient that is not finite changes nothing.

        Raises StageFailed after MAX_BAD_STEPS steps in a row that were not finite.
        """
        assert self._sums is not None
        sums, self._sums = self._sums, None
        config = self.config
        lr = learning_rate(
            progress(epoch, step, steps_in_epoch, config.epochs),
            peak=config.lr,
            floor=config.min_lr,
            warmup=config.warmup,
        )
        loss, weight = float(sums.loss), float(sums.weight)
        norm = self._divide_and_clip(weight) if weight > 0 else 0.0
        finite = math.isfinite(loss) and math.isfinite(norm)
        if weight > 0 and finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps >= MAX_BAD_STEPS:
            raise StageFailed(
                f"loss or gradient was not finite in {MAX_BAD_STEPS} steps in a row, last epoch {epoch} step {step}: "
                f"Σ w·CE = {loss}, gradient norm = {norm}. Lower training.lr, or look at the rows of these steps."
            )
        return StepReport(
            epoch=epoch,
            step=step,
            steps_in_epoch=steps_in_epoch,
            loss_sum=loss,
            weight_sum=weight,
            correct_by_slot=tuple(sums.correct.tolist()),
            counted_by_slot=tuple(sums.counted.tolist()),
            tokens=sums.tokens,
            lr=lr,
            grad_norm=norm,
            skipped=weight <= 0 or not finite,
        )

    def _divide_and_clip(self, weight: float) -> float:
        """Gradients of Σ w·CE become those of Σ w·CE / Σ w, no longer than `clip`; the norm before clipping."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        torch._foreach_div_(gradients, weight)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.config.clip)
        return float(norm)

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
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in tensors:
                    value = tensors[f"{key}.{name}"]
                    state[key] = value.clone() if key == "step" else value.to(parameter.device, copy=True)
            if state:
                self.optimizer.state[parameter] = state


def forward_loss(drafter: Drafter, embedding: nn.Module, head: Head, item: FeatureBatch) -> BlockLoss:
    """Σ w·CE of one micro-batch, from features to loss."""
    batch = item.batch
    with torch.no_grad():
        embedded = embed_blocks(embedding, batch.labels[..., 0], drafter.shape.block_size, drafter.shape.mask_token_id)
    hidden = drafter(item.features, embedded.to(drafter.fc.weight.dtype), batch.anchor)
    return block_loss(hidden, head, batch.labels, batch.weights)


def embed_blocks(embedding: nn.Module, anchor_token: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Embeddings of blocks `[anchor's token, mask, …, mask]`: `[…, K, H]` for anchor tokens `[…]`."""
    block = torch.full((*anchor_token.shape, block_size), mask_token_id, device=anchor_token.device)
    block[..., 0] = anchor_token
    embedded: Tensor = embedding(block)
    return embedded


def _add(sums: _Sums | None, loss: BlockLoss, tokens: int) -> _Sums:
    total = loss.total.detach()
    if sums is None:
        return _Sums(total, loss.weight, loss.correct_by_slot, loss.counted_by_slot, tokens)
    return _Sums(
        sums.loss + total,
        sums.weight + loss.weight,
        sums.correct + loss.correct_by_slot,
        sums.counted + loss.counted_by_slot,
        sums.tokens + tokens,
    )
