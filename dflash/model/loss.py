"""Losses of the counted slots through a frozen head, in one pass over tiles of the vocabulary.

    ce      Σ w·CE over Σ w, w_k = exp(−(k−1)/γ)                           (arXiv 2602.06036, equation 4)
    dpace   the same with w_k made from the drafter's own confidence       (arXiv 2605.18810)
    kl      Σ w·KL(target ‖ drafter) over Σ w

The step divides one sum by the other. As in flash attention, running maxima and sums replace the whole softmax: the
gradient p·W − W[label] of the hidden states is summed in the same pass as the loss. So `[slots, V]` is never whole,
nothing is computed twice, and the head gets no gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash.model.head import Head, at_least_float32

LossKind = Literal["ce", "dpace", "kl"]

# Smoothing of D-PACE's confidences: a slot that is surely wrong still leaves half of the weight to those behind it.
_ALPHA = 0.5

# Slots and rows of the head that are multiplied at once. On a CPU the logits of a tile stay in its caches; a GPU wants
# large products.
_TILE = {"cpu": (512, 6144), "cuda": (2048, 32768)}


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Sums over the counted slots of one micro-batch; `total` carries the gradient, `weight` is Σ w."""

    total: Tensor
    weight: Tensor
    correct_by_slot: Float[Tensor, " K"]
    counted_by_slot: Float[Tensor, " K"]


def block_loss(
    hidden: Float[Tensor, "B A K H"],
    head: Head,
    labels: Int[Tensor, "B A K"],
    weights: Float[Tensor, "B A K"],
    kind: LossKind = "ce",
    states: Float[Tensor, "B A K H"] | None = None,
    counted: Int[Tensor, " n"] | None = None,
) -> BlockLoss:
    """Σ w·loss over slots with w > 0, and how often the largest logit was right, by slot.

    `counted` are the flat numbers of these slots; without them a GPU has to be waited for, to find them here.

    `kl` needs `states`: for each slot the target's final hidden state of the position before its label, whose logits
    are the law that the slot should give.
    """
    assert (states is not None) == (kind == "kl")
    slots = weights.shape[-1]
    if counted is None:
        counted = torch.nonzero(weights.flatten() > 0).squeeze(1)
    picked = hidden.flatten(0, 2).index_select(0, counted)
    wanted = None if states is None else states.flatten(0, 2).index_select(0, counted)
    label, weight = labels.flatten()[counted].long(), weights.flatten()[counted]
    loss, right = _SlotLoss.apply(picked, head, label, wanted)  # type: ignore[no-untyped-call]
    if kind == "dpace":
        confidence = torch.zeros_like(weights).view(-1)
        confidence[counted] = (-loss.detach()).exp().to(confidence.dtype)
        weight = dpace_weights(confidence.view(weights.shape), weights > 0).flatten()[counted]
    slot = counted % slots
    zeros = torch.zeros(slots, device=hidden.device)
    return BlockLoss(
        total=(loss * weight).sum(),
        weight=weight.sum(dtype=torch.float64),
        correct_by_slot=zeros.index_add(0, slot, right.float()),
        counted_by_slot=zeros.index_add(0, slot, torch.ones_like(right, dtype=torch.float32)),
    )


def label_states(
    final: Float[Tensor, "B S H"], anchor: Int[Tensor, "B A"], block_size: int
) -> Float[Tensor, "B A K H"]:
    """For slot k the final state at anchor + k − 1, whose logits are the law of the token at anchor + k.

    Slots past the row, which do not count, repeat its last state.
    """
    positions = anchor[..., None] + torch.arange(block_size, device=anchor.device) - 1
    positions = positions.clamp(0, final.shape[1] - 1).long()
    return final[torch.arange(final.shape[0], device=final.device)[:, None, None], positions]


def dpace_weights(confidence: Float[Tensor, "*n K"], counts: Bool[Tensor, "*n K"]) -> Float[Tensor, "*n K"]:
    """w_k = Σ_{j≥k} Π_{i≤j} ((1−α)·q_i + α) over counted slots, q_i the drafter's probability of label i.

    The expected number of accepted drafts that depend on slot k, confidences smoothed (arXiv 2605.18810).
    """
    smooth = torch.where(counts, (1 - _ALPHA) * confidence + _ALPHA, 1.0)
    reached = torch.cumprod(smooth, dim=-1) * counts
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


class _SlotLoss(torch.autograd.Function):
    """Loss of each slot; its gradient of the hidden states is made with it and only scaled in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, head, label, states):  # type: ignore[no-untyped-def]
        loss = torch.empty(label.shape, dtype=at_least_float32(hidden.dtype), device=hidden.device)
        right = torch.empty(label.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        step = _TILE[hidden.device.type][0]
        for start in range(0, hidden.shape[0], step):
            piece = slice(start, start + step)
            theirs = None if states is None else states[piece]
            loss[piece], right[piece], gradient[piece] = _slot_losses(hidden[piece], head, label[piece], theirs)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, upstream, _):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None, None


class _Running:
    """Σ exp(logit) · row over the tiles so far, relative to the largest logit so far."""

    def __init__(self, hidden: Float[Tensor, "n H"], dtype: torch.dtype) -> None:
        self.rows = torch.zeros_like(hidden, dtype=dtype)
        self.mass = torch.zeros_like(self.rows[:, :1])
        self.inner = torch.zeros_like(self.mass)
        self.peak = torch.full_like(self.mass, -torch.inf)

    def add(self, logits: Tensor, rows: Tensor, slope: Tensor | None, inner: Tensor | None = None) -> None:
        """One tile: `logits` is overwritten; `slope` bends the rows' share, `inner` is what else is averaged."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        shrink = (self.peak - peak).exp_()
        exponentials = logits.sub_(peak).exp_()
        self.peak = peak
        self.mass.mul_(shrink).add_(exponentials.sum(-1, keepdim=True))
        if inner is not None:
            self.inner.mul_(shrink).add_((exponentials * inner).sum(-1, keepdim=True))
        if slope is not None:
            exponentials *= slope
        if rows.dtype == self.rows.dtype:
            self.rows.mul_(shrink).addmm_(exponentials, rows)
        else:
            self.rows.mul_(shrink).add_(exponentials.to(rows.dtype) @ rows)

    def log_mass(self) -> Tensor:
        """log Σ exp(logit)."""
        return self.peak + self.mass.log()


def _slot_losses(hidden: Tensor, head: Head, label: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, whether the largest logit is the label's, and ∂loss/∂hidden, for a few slots."""
    vocabulary, step = head.weight.shape[0], _TILE[hidden.device.type][1]
    dtype = at_least_float32(hidden.dtype)
    own = _Running(hidden, dtype)
    theirs = None if states is None else _Running(hidden, dtype)
    at_label = torch.zeros_like(own.mass)
    right = torch.zeros_like(label, dtype=torch.bool)
    for start in range(0, vocabulary, step):
        stop = min(start + step, vocabulary)
        rows, logits = head.weight[start:stop], head.tile(hidden, start, stop).to(dtype)
        slope = head.slope(logits)
        _read_label(logits, label, start, own.peak, at_label, right)
        if theirs is not None and states is not None:
            wanted = head.tile(states, start, stop).to(dtype)
            theirs.add(wanted, rows, slope, inner=wanted - logits)
            del wanted
        own.add(logits, rows, slope)
        del logits, slope  # or this tile would still be there while the next one is made
    right &= (at_label == own.peak).squeeze(1)
    gradient = own.rows / own.mass
    if theirs is not None:
        # KL = Σ p·(log p − log q) = Σ p·(logit_p − logit_q) − log Σ exp(logit_p) + log Σ exp(logit_q)
        loss = theirs.inner / theirs.mass - theirs.log_mass() + own.log_mass()
        gradient -= theirs.rows / theirs.mass
    else:
        loss = own.log_mass() - at_label
        at_row = head.weight[label].to(dtype)
        slope = head.slope(at_label)
        gradient -= at_row if slope is None else at_row * slope
    return loss.squeeze(1), right, gradient * head.scale


def _read_label(logits: Tensor, label: Tensor, start: int, before: Tensor, at_label: Tensor, right: Tensor) -> None:
    """Where the label lies in this tile: its logit, and whether it is the first of the largest logits so far."""
    column = label - start
    inside = (column >= 0) & (column < logits.shape[1])
    if logits.device.type == "cpu":
        # argmax is the slowest of these operations: it runs over the few slots whose label can be the largest alone.
        here = inside.nonzero().squeeze(1)
        column = column[here]
        value = logits[here, column]
        at_label[here] = value[:, None]
        largest = (value == logits.amax(-1)[here]) & (value > before[here].squeeze(1))
        here = here[largest]
        right[here] = logits[here].argmax(-1) == column[largest]
        return
    column = column.clamp(0, logits.shape[1] - 1)
    value = logits.gather(1, column[:, None])
    at_label.copy_(torch.where(inside[:, None], value, at_label))
    first = (logits.argmax(-1) == column) & (value > before).squeeze(1)
    right.copy_(torch.where(inside, first, right))
