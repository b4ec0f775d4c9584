"""The target's head with a trained table beside it: logits W·h + W2·m of `[h; m]`, in the same tiles.

The tiles' pass knows p only when it ends, so the gradient of the table, Σ ω·∂loss/∂logit·m, takes a second pass over
them in the backward pass. Heads that bend their logits (softcap) are refused: the table's share would be bent, too.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash.model.head import Head, at_least_float32
from dflash.model.laws import LossKind, both_masses, logit_errors


@dataclass(frozen=True, slots=True)
class TableHead(Head):
    """`weight` and the others are the target's; `table` is `[V, r]`."""

    table: Float[Tensor, "V r"] | None = None

    @classmethod
    def of(cls, head: Head, table: Tensor) -> "TableHead":
        assert head.softcap is None
        return cls(head.weight, head.bias, None, head.scale, head.unknown, table)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.table is not None
        state, met = self._apart(hidden)
        bonus = met.to(self.table.dtype) @ self.table.T
        logits = Head.logits(self, state)
        return logits + bonus.to(at_least_float32(logits.dtype))

    def tile(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        assert self.table is not None
        state, met = self._apart(hidden)
        logits = Head.tile(self, state, start, stop)
        if met.shape[1]:  # the target's own states have no such columns
            logits = logits + (met.to(self.table.dtype) @ self.table[start:stop].T).to(logits.dtype)
        return logits

    def rows(self, start: int, stop: int) -> Tensor:
        assert self.table is not None
        return torch.cat([self.weight[start:stop], self._scaled(self.table[start:stop])], dim=1)

    def rows_at(self, ids: Tensor) -> Tensor:
        assert self.table is not None
        return torch.cat([self.weight[ids], self._scaled(self.table[ids])], dim=1)

    def _scaled(self, rows: Tensor) -> Tensor:
        return (rows / self.scale).to(self.weight.dtype)  # gradients are multiplied by the head's scale

    def _apart(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        width = self.weight.shape[1]
        return hidden[..., :width], hidden[..., width:]


def with_table_gradient(
    loss: Float[Tensor, " n"],
    hidden: Float[Tensor, "n w"],
    head: TableHead,
    label: Int[Tensor, " n"],
    states: Float[Tensor, "n H"] | None,
    kind: LossKind,
    tile: tuple[int, int],
) -> Float[Tensor, " n"]:
    """The same losses, whose backward pass gives the head's table its gradient."""
    out: Tensor = _TableGradient.apply(loss, head.table, hidden.detach(), head, label, states, kind, tile)  # type: ignore[no-untyped-call]
    return out


class _TableGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, table, hidden, head, label, states, kind, tile):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, label, *([] if states is None else [states]))
        ctx.head, ctx.kind, ctx.tile = head, kind, tile
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        hidden, label, *rest = ctx.saved_tensors
        states = rest[0] if rest else None
        head, (slots, columns) = ctx.head, ctx.tile
        table = torch.zeros_like(head.table)
        for first in range(0, hidden.shape[0], slots):
            piece = slice(first, first + slots)
            some = hidden[piece]
            theirs = None if states is None else states[piece]
            masses = both_masses(head, some, theirs, columns)
            met = (upstream[piece, None] * head._apart(some)[1]).to(table.dtype)
            for start, error in logit_errors(head, some, label[piece], theirs, ctx.kind, masses, columns):
                table[start : start + error.shape[1]].addmm_(error.T.to(table.dtype), met)
        return upstream, table, *[None] * 6
