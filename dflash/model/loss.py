"""Losses of the counted slots through a frozen head, in one pass over tiles of the vocabulary.

    ce      Σ w·CE over Σ w, w_k = exp(−(k−1)/γ)                           (arXiv 2602.06036, equation 4)
    dpace   the same with w_k made from the drafter's own confidence       (arXiv 2605.18810)
    kl      Σ w·KL(target ‖ drafter) over Σ w
    dspark  Σ w·(0.1·CE + 0.9·Σ|q − p|) over Σ w                           (arXiv 2607.05147)

The step divides one sum by the other. As in flash attention, running maxima and sums replace the whole softmax: the
gradient Σ p·W − W[label] of the hidden states is summed in the same pass as the loss. So `[slots, V]` is never whole,
and the head gets no gradient. `kl` alone makes the logits twice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash.model.candidates import Candidates, Collected
from dflash.model.head import Head, at_least_float32
from dflash.model.laws import LossKind as LossKind
from dflash.model.laws import SparkLoss
from dflash.model.table_head import TableHead, with_table_gradient

NEEDS_STATES = ("kl", "dspark")  # losses that compare with the target's law

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
    slot_weight: Float[Tensor, " n"] | None = None  # w of the counted slots
    best: tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]] | None = None  # their largest logits, ids rising
    distance: Float[Tensor, " n"] | None = None  # Σ|q − p|, where the loss takes it


def block_loss(
    hidden: Float[Tensor, "B A K H"],
    head: Head,
    labels: Int[Tensor, "B A K"],
    weights: Float[Tensor, "B A K"],
    kind: LossKind = "ce",
    states: Float[Tensor, "B A K H"] | None = None,
    counted: Int[Tensor, " n"] | None = None,
    candidates: int = 0,
) -> BlockLoss:
    """Σ w·loss over slots with w > 0, and how often the largest logit was right, by slot.

    `counted` are the flat numbers of these slots; without them a GPU has to be waited for, to find them here.

    `candidates`: that many of each slot's largest logits come with the loss, from the same tiles.

    `kl` and `dspark` need `states`: for each slot the target's final hidden state of the position before its label,
    whose logits are the law that the slot should give.
    """
    assert (states is not None) == (kind in NEEDS_STATES)
    slots = weights.shape[-1]
    if counted is None:
        counted = torch.nonzero(weights.flatten() > 0).squeeze(1)
    picked = hidden.flatten(0, 2).index_select(0, counted)
    wanted = None if states is None else states.flatten(0, 2).index_select(0, counted)
    label, weight = labels.flatten()[counted].long(), weights.flatten()[counted]
    best = Collected(candidates) if candidates else None
    tile, distance = _TILE[hidden.device.type], None
    if kind == "dspark":
        loss, right, distance = SparkLoss.apply(picked, head, label, wanted, tile, best)  # type: ignore[no-untyped-call]
    else:
        loss, right = _SlotLoss.apply(picked, head, label, wanted, best)  # type: ignore[no-untyped-call]
    if isinstance(head, TableHead):
        loss = with_table_gradient(loss, picked, head, label, wanted, kind, tile)
    if kind == "dpace":
        confidence = torch.zeros_like(weights).view(-1)
        confidence[counted] = (-loss.detach()).exp().to(confidence.dtype)
        weight = dpace_weights(confidence.view(weights.shape), weights > 0).flatten()[counted]
    right = right & (weight > 0)  # a label that the drafter's vocabulary lacks is none of its drafts
    slot = counted % slots
    zeros = torch.zeros(slots, device=hidden.device)
    return BlockLoss(
        total=(loss * weight).sum(),
        weight=weight.sum(dtype=torch.float64),
        correct_by_slot=zeros.index_add(0, slot, right.float()),
        counted_by_slot=zeros.index_add(0, slot, torch.ones_like(right, dtype=torch.float32)),
        slot_weight=weight,
        best=None if best is None else best.by_id(),
        distance=distance,
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
    def forward(ctx, hidden, head, label, states, best):  # type: ignore[no-untyped-def]
        loss = torch.empty(label.shape, dtype=at_least_float32(hidden.dtype), device=hidden.device)
        right = torch.empty(label.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        step = _TILE[hidden.device.type][0]
        for start in range(0, hidden.shape[0], step):
            piece = slice(start, start + step)
            some = None if best is None else best.piece()
            if states is None:
                found = _cross_entropies(hidden[piece], head, label[piece], some)
            else:
                found = _divergences(hidden[piece], head, label[piece], states[piece], some)
            loss[piece], right[piece], gradient[piece] = found
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, upstream, _):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), *[None] * 4


class _Running:
    """Σ exp(logit) over the tiles so far, relative to the largest logit so far."""

    def __init__(self, hidden: Float[Tensor, "n H"], dtype: torch.dtype) -> None:
        self.mass = torch.zeros_like(hidden[:, :1], dtype=dtype)
        # Not −∞: in a tile of columns that the head rules out, −∞ − (−∞) would be no number.
        self.peak = torch.full_like(self.mass, torch.finfo(dtype).min)

    def exponentials(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """exp(logit − peak) in place of a tile's logits, and the factor for all that was summed before."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        shrink = (self.peak - peak).exp_()
        self.peak = peak
        return logits.sub_(peak).exp_(), shrink

    def log_mass(self) -> Tensor:
        """log Σ exp(logit)."""
        return self.peak + self.mass.log()


def _cross_entropies(
    hidden: Tensor, head: Head, label: Tensor, best: Candidates | None
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, whether the largest logit is the label's, and ∂CE/∂hidden, for a few slots.

    The label's own column stays out of the products and of the mass: where it has nearly all of the probability, p − 1
    would be the difference of two rounded numbers, an error of 58 % in bfloat16 at p = 0.999.
    """
    dtype = at_least_float32(hidden.dtype)
    rest = _Running(hidden, dtype)
    summed = torch.zeros_like(hidden, dtype=dtype)
    at_label = torch.zeros_like(rest.mass)
    right = torch.zeros_like(label, dtype=torch.bool)
    for start, stop in _tiles(head, hidden):
        rows, logits = head.rows(start, stop), head.tile(hidden, start, stop).to(dtype)
        slope = head.slope(logits)
        _read_label(logits, label, start, rest.peak, at_label, right)
        if best is not None:
            best.add(logits, start)
        exponentials, shrink = rest.exponentials(logits)
        _clear_label(exponentials, label, start)
        rest.mass.mul_(shrink).add_(exponentials.sum(-1, keepdim=True))
        if slope is not None:
            exponentials *= slope
        _add_product(summed.mul_(shrink), exponentials, rows)
        del logits, exponentials, slope  # or this tile would still be there while the next one is made
    right &= (at_label == rest.peak).squeeze(1)
    mass = rest.mass + (at_label - rest.peak).exp()
    loss = rest.peak + mass.log() - at_label
    at_row = head.rows_at(label).to(dtype)
    slope = head.slope(at_label)
    gradient = summed.sub_((at_row if slope is None else at_row * slope) * rest.mass).div_(mass)
    return loss.squeeze(1), right, gradient * head.scale


def _divergences(
    hidden: Tensor, head: Head, label: Tensor, states: Tensor, best: Candidates | None
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(target ‖ drafter), whether the largest logit is the label's, and ∂KL/∂hidden, for a few slots.

    Two passes: q − p is taken before it is rounded for the product with the head's rows. Both laws may have nearly all
    of their mass in the same few columns; a difference of two products would then be rounding alone.
    """
    dtype = at_least_float32(hidden.dtype)
    own, theirs = _Running(hidden, dtype), _Running(hidden, dtype)
    at_label, inner = torch.zeros_like(own.mass), torch.zeros_like(own.mass)
    right = torch.zeros_like(label, dtype=torch.bool)
    for start, stop in _tiles(head, hidden):
        logits, wanted = head.tile(hidden, start, stop).to(dtype), head.tile(states, start, stop).to(dtype)
        _read_label(logits, label, start, own.peak, at_label, right)
        if best is not None:
            best.add(logits, start)
        # A column that the head rules out has no mass on either side.
        apart = (wanted - logits).masked_fill_(wanted == -torch.inf, 0.0)
        exponentials, shrink = theirs.exponentials(wanted)
        theirs.mass.mul_(shrink).add_(exponentials.sum(-1, keepdim=True))
        inner.mul_(shrink).add_(apart.mul_(exponentials).sum(-1, keepdim=True))
        exponentials, shrink = own.exponentials(logits)
        own.mass.mul_(shrink).add_(exponentials.sum(-1, keepdim=True))
        del logits, wanted, apart, exponentials
    right &= (at_label == own.peak).squeeze(1)
    # KL = Σ p·(log p − log q) = Σ p·(logit_p − logit_q) − log Σ exp(logit_p) + log Σ exp(logit_q)
    loss = inner / theirs.mass - theirs.log_mass() + own.log_mass()
    gradient = torch.zeros_like(hidden, dtype=dtype)
    for start, stop in _tiles(head, hidden):
        logits, wanted = head.tile(hidden, start, stop).to(dtype), head.tile(states, start, stop).to(dtype)
        slope = head.slope(logits)
        apart = logits.sub_(own.log_mass()).exp_().sub_(wanted.sub_(theirs.log_mass()).exp_())
        if slope is not None:
            apart *= slope
        _add_product(gradient, apart, head.rows(start, stop))
        del logits, wanted, apart, slope
    return loss.squeeze(1), right, gradient * head.scale


def _tiles(head: Head, hidden: Tensor) -> list[tuple[int, int]]:
    """Ranges of the vocabulary that are multiplied at once."""
    vocabulary, step = head.weight.shape[0], _TILE[hidden.device.type][1]
    return [(start, min(start + step, vocabulary)) for start in range(0, vocabulary, step)]


def _add_product(total: Tensor, left: Tensor, rows: Tensor) -> None:
    """total += left · rows, the product in the dtype of the head's rows."""
    if rows.dtype == total.dtype:
        total.addmm_(left, rows)
    else:
        total.add_(left.to(rows.dtype) @ rows)


def _clear_label(tile: Tensor, label: Tensor, start: int) -> None:
    """0 in the label's column, where it lies in this tile."""
    column = (label - start)[:, None]
    inside = (column >= 0) & (column < tile.shape[1])
    column = column.clamp(0, tile.shape[1] - 1)
    tile.scatter_(1, column, tile.gather(1, column).masked_fill_(inside, 0.0))


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
