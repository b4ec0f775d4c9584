"""The drafter's law q and the target's p over tiles of the vocabulary, in two passes: first what normalises them.

DSpark's loss of a slot (arXiv 2607.05147) needs both at once: 0.1·CE + 0.9·Σ|q − p|. By the slot's logits z

    ∂CE/∂z = q − onehot,   ∂Σ|q − p|/∂z_v = q_v·(s_v − Σ q·s),   s = sign(q − p)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash.model.candidates import Candidates, Collected
from dflash.model.head import Head, at_least_float32

LossKind = Literal["ce", "dpace", "kl", "dspark"]

CE_SHARE, DISTANCE_SHARE = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class Masses:
    """log Σ exp(logit) of both laws, `[n, 1]`; and Σ q·s where it has been taken."""

    own: Tensor
    theirs: Tensor | None


def both_masses(head: Head, hidden: Tensor, states: Tensor | None, columns: int) -> Masses:
    """The first pass."""
    own = _log_mass(head, hidden, columns)
    return Masses(own, None if states is None else _log_mass(head, states, columns))


def laws(
    head: Head, hidden: Float[Tensor, "n w"], states: Tensor | None, masses: Masses, columns: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
    """By tile: its first id, the drafter's logits, q, and p where there are states."""
    for start, stop in _tiles(head, columns):
        logits = head.tile(hidden, start, stop).to(masses.own.dtype)
        theirs = None
        if states is not None and masses.theirs is not None:
            theirs = (head.tile(states, start, stop).to(masses.theirs.dtype) - masses.theirs).exp_()
        yield start, logits, (logits - masses.own).exp(), theirs


def logit_errors(
    head: Head,
    hidden: Float[Tensor, "n w"],
    label: Int[Tensor, " n"],
    states: Tensor | None,
    kind: LossKind,
    masses: Masses,
    columns: int,
) -> Iterator[tuple[int, Float[Tensor, "n columns"]]]:
    """∂loss/∂logit of each slot by tile, with the tile's first id."""
    inner = torch.zeros_like(masses.own)
    if kind == "dspark":
        given = laws(head, hidden, states, masses, columns)
        parts = [(q * (q - p).sign()).sum(1, keepdim=True) for _, _, q, p in given if p is not None]
        inner = torch.stack(parts).sum(0)
    for start, _, q, p in laws(head, hidden, states, masses, columns):
        if kind == "kl":
            assert p is not None
            yield start, q - p
            continue
        column = label - start
        inside = (column >= 0) & (column < q.shape[1])
        onehot = torch.zeros_like(q).scatter_(1, column.clamp(0, q.shape[1] - 1)[:, None], inside[:, None].to(q.dtype))
        if kind != "dspark":
            yield start, q - onehot
        else:
            assert p is not None
            yield start, CE_SHARE * (q - onehot) + DISTANCE_SHARE * q * ((q - p).sign() - inner)


class SparkLoss(torch.autograd.Function):
    """Loss of each slot, whether its largest logit is the label's, and Σ|q − p|; the gradient is made with it."""

    @staticmethod
    def forward(ctx, hidden, head: Head, label, states, tile: tuple[int, int], best: Collected | None):  # type: ignore[no-untyped-def]
        shape, dtype = label.shape, at_least_float32(hidden.dtype)
        loss, distance = (torch.empty(shape, dtype=dtype, device=hidden.device) for _ in range(2))
        right = torch.empty(shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], tile[0]):
            piece = slice(start, start + tile[0])
            loss[piece], right[piece], distance[piece], gradient[piece] = _spark(
                hidden[piece], head, label[piece], states[piece], tile[1], None if best is None else best.piece()
            )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right, distance)
        return loss, right, distance

    @staticmethod
    def backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), *[None] * 5


def _spark(
    hidden: Tensor, head: Head, label: Tensor, states: Tensor, columns: int, best: Candidates | None
) -> tuple[Tensor, ...]:
    masses = both_masses(head, hidden, states, columns)
    zero = torch.zeros_like(masses.own)
    distance, inner, at_label = zero.clone(), zero.clone(), zero.clone()
    peak = torch.full_like(zero, -torch.inf)
    right = torch.zeros_like(label, dtype=torch.bool)
    # Σ q·W and Σ q·s·W: what Σ q·s multiplies is known only at the end.
    plain, signed = (torch.zeros_like(hidden, dtype=masses.own.dtype) for _ in range(2))
    for start, logits, q, p in laws(head, hidden, states, masses, columns):
        assert p is not None
        difference = q - p
        distance += difference.abs().sum(1, keepdim=True)
        q_signed = q * difference.sign()
        inner += q_signed.sum(1, keepdim=True)
        if best is not None:
            best.add(logits, start)
        column = (label - start)[:, None]
        inside = (column >= 0) & (column < logits.shape[1])
        value = logits.gather(1, column.clamp(0, logits.shape[1] - 1))
        at_label = torch.where(inside, value, at_label)
        largest = logits.argmax(1, keepdim=True)
        height = logits.gather(1, largest)
        right = torch.where((height > peak).squeeze(1), (largest == column).squeeze(1), right)
        peak = torch.maximum(peak, height)
        rows, slope = head.rows(start, start + logits.shape[1]), head.slope(logits)
        for sums, weights in ((plain, q), (signed, q_signed)):
            sums += (weights if slope is None else weights * slope).to(rows.dtype) @ rows
    label_rows, slope = head.rows_at(label).to(plain.dtype), head.slope(at_label)
    gradient = CE_SHARE * (plain - (label_rows if slope is None else label_rows * slope))
    gradient += DISTANCE_SHARE * (signed - inner * plain)
    loss = CE_SHARE * (masses.own - at_label) + DISTANCE_SHARE * distance
    return loss.squeeze(1), right, distance.squeeze(1), gradient * head.scale


def _tiles(head: Head, columns: int) -> Iterator[tuple[int, int]]:
    vocabulary = head.weight.shape[0]
    for start in range(0, vocabulary, columns):
        yield start, min(start + columns, vocabulary)


def _log_mass(head: Head, hidden: Tensor, columns: int) -> Tensor:
    total = None
    for start, stop in _tiles(head, columns):
        part = head.tile(hidden, start, stop).to(at_least_float32(hidden.dtype)).logsumexp(1, keepdim=True)
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return total
