"""One optimizer step: Σ w·CE and its gradient over the micro-batches, divided by Σ w of the whole step, then clipped.

A mean of micro-batch means would weigh a micro-batch with few counted slots as much as a full one. Sums go over the
micro-batches of all processes. Nothing here waits for the device: what a step did is read from a PendingReport.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash.batch import FeatureBatch, Step
from dflash.config import TrainingConfig
from dflash.distributed import ALONE, Ranks
from dflash.model.drafter import Drafter, embed_blocks
from dflash.model.drafter_loss import drafter_loss
from dflash.model.head import Head
from dflash.model.look_back import Slots
from dflash.model.loss import NEEDS_STATES, BlockLoss, LossKind, label_states
from dflash.step_sums import PendingReport, StepSums
from dflash.training.schedule import learning_rate, progress

_ALIGN = 16  # elements: each parameter's gradient starts where vector instructions can read it


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
        drafter.recompute = config.recompute
        self.embedding = embedding
        self.head = head
        self.config = config
        self.device = drafter.fc.weight.device
        self.parameters = dict(drafter.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=0.0, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._ranks, self._stop_asked = ranks, stop_asked
        self._gradient = flat_gradient(list(self.parameters.values()))
        self._sums = StepSums.zeros(drafter.shape.block_size, self.device)

    def accumulate(self, item: FeatureBatch) -> None:
        """Add the gradient of one micro-batch's Σ w·CE."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = forward_loss(
                self.drafter, self.embedding, self.head, item, self.config.loss, self.config.selector_weight
            )
        if loss.total.requires_grad:
            loss.total.backward()  # type: ignore[no-untyped-call]
        self._sums.add(loss.total, loss.weight, loss.correct_by_slot, loss.counted_by_slot, item.batch)

    def forget(self) -> None:
        """Drop what has been accumulated since the last step."""
        self._gradient.zero_()
        self._sums.vector.zero_()

    def step(self, at: Step) -> PendingReport:
        """Divide, clip, update. A step with Σ w = 0, or whose loss or gradient is not finite, changes nothing."""
        config = self.config
        done = progress(at.epoch, at.step, at.steps_in_epoch, config.epochs)
        lr = learning_rate(done, peak=config.lr, floor=config.min_lr, warmup=config.warmup)
        self._sums["stop"].fill_(self._stop_asked())
        self._ranks.add(self._gradient, self._sums.vector)
        loss, weight = self._sums["loss"][0], self._sums["weight"][0]
        self._gradient.div_(weight)  # gradients of Σ w·CE become those of Σ w·CE / Σ w
        norm = torch.linalg.vector_norm(self._gradient)
        self._gradient.mul_((config.clip / (norm + 1e-6)).clamp(max=1.0))
        skipped = ~(torch.isfinite(loss) & torch.isfinite(norm) & (weight > 0))
        # The optimizer's kernels look at it, so the host need not: 1 leaves weights, moments and step counts alone.
        self.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        pending = PendingReport.of(at, lr, self._sums, norm, skipped)
        self.forget()
        return pending

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
    drafter: Drafter,
    embedding: nn.Module,
    head: Head,
    item: FeatureBatch,
    kind: LossKind = "ce",
    selector_weight: float = 0.1,
) -> BlockLoss:
    """Σ w·loss of one micro-batch, from features to loss.

    For losses that compare with the target's law, features end with the target's final state.
    """
    batch, width = item.batch, drafter.fc.in_features
    with torch.no_grad():
        size, mask, dtype = drafter.shape.block_size, drafter.shape.mask_token_id, drafter.fc.weight.dtype
        embedded = embed_blocks(embedding, batch.labels[..., 0], size, mask, dtype)
    hidden = drafter(item.features[..., :width], embedded, batch.anchor)
    states = None
    if kind in NEEDS_STATES:
        states = label_states(item.features[..., width:], batch.anchor, drafter.shape.block_size)
    slots = Slots(batch.labels, batch.weights, kind, states, batch.counted, selector_weight)
    return drafter_loss(drafter, embedding, head, hidden, slots)
