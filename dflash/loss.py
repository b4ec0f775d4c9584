"""Weighted cross-entropy over the counted slots, in chunks, through a frozen head.

    Σ w·CE and Σ w;  the step divides one by the other                     (arXiv 2602.06036, equation 4)

The gradient of the hidden states is made in the forward pass, while a chunk's logits exist: `[slots, V]` is never whole,
nothing is computed twice, and the head gets no gradient.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Logits held at once, in elements: 64 Mi float32 values are 256 MiB.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Head:
    """The target's LM head: `softcap(weight · hidden + bias) · scale`."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n V"]:
        """The target's logits of final hidden states."""
        logits = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """Sums over the counted slots of one micro-batch; `total` carries the gradient."""

    total: Tensor
    weight: Tensor
    correct_by_slot: Float[Tensor, " K"]
    counted_by_slot: Float[Tensor, " K"]


def block_loss(
    hidden: Float[Tensor, "B A K H"],
    head: Head,
    labels: Int[Tensor, "B A K"],
    weights: Float[Tensor, "B A K"],
) -> BlockLoss:
    """Σ w·CE over slots with w > 0, and how often the largest logit was right, by slot."""
    slots = weights.shape[-1]
    counted = torch.nonzero(weights.flatten() > 0).squeeze(1)
    picked = hidden.flatten(0, 2).index_select(0, counted)
    label, weight = labels.flatten()[counted].long(), weights.flatten()[counted]
    total, right = _ChunkedCrossEntropy.apply(picked, head, label, weight)  # type: ignore[no-untyped-call]
    slot = counted % slots
    zeros = torch.zeros(slots, device=hidden.device)
    return BlockLoss(
        total=total,
        weight=weight.sum(),
        correct_by_slot=zeros.index_add(0, slot, right.float()),
        counted_by_slot=zeros.index_add(0, slot, torch.ones_like(right, dtype=torch.float32)),
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, label, weight):  # type: ignore[no-untyped-def]
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        right = torch.zeros(label.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        rows = max(1, _CHUNK_ELEMENTS // head.weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            piece = slice(start, start + rows)
            total += _chunk(hidden[piece], head, label[piece], weight[piece], gradient[piece], right[piece])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx, upstream, _):  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None


def _chunk(hidden: Tensor, head: Head, label: Tensor, weight: Tensor, gradient: Tensor, right: Tensor) -> Tensor:
    """Σ w·CE of one chunk; writes ∂/∂hidden and which slots were right."""
    logits = head.logits(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    torch.eq(logits.argmax(-1), label, out=right)
    peak = logits.amax(-1, keepdim=True)
    at_label = logits.gather(1, label[:, None])
    # ∂CE/∂capped = softmax − onehot, and d(tanh cap)/d(raw) = 1 − (capped/cap)².
    slope = 1 - (logits / head.softcap).square() if head.softcap is not None else None
    logits -= peak
    exponentials = logits.exp_()
    norm = exponentials.sum(-1, keepdim=True)
    cross_entropy = (norm.log() + peak - at_label).squeeze(1)
    exponentials *= weight[:, None] / norm
    exponentials.scatter_add_(1, label[:, None], -weight[:, None].to(exponentials.dtype))
    if slope is not None:
        exponentials *= slope
    if head.scale != 1.0:
        exponentials *= head.scale
    gradient.copy_(exponentials.to(head.weight.dtype) @ head.weight)
    return (cross_entropy * weight).sum()
