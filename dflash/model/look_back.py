"""Correction of a slot's logits by the token before it, through tables of low rank.

    S(p, c) = U(c) + T[c] · v(h, p)        U the head's logits of the slot's state h, p the token of the slot before

Free tables are trained row by row, as published: W1 [V, r] reads p, T = W2 [V, r]. Frozen ones are made from the
target's embedding E and head W, which see every token: W1 = RMSNorm(E)·A, W2 = W·diag(g)·B with small A, B and g the
weight of the drafter's last norm. Then T is the head itself and v = g∘(B·…), so a state is shifted and nothing as
wide as the vocabulary is trained. `written_out` gives the tables that they are.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash.model.head import Head
from dflash.model.loss import BlockLoss, LossKind
from dflash.model.part import Part
from dflash.model.shape import DrafterShape

_ROWS = 1 << 14  # rows of a table that are made at once


@dataclass(frozen=True, slots=True)
class Ends:
    """What a correction reads besides its own parameters."""

    embedding: nn.Module
    head: Head
    norm: Float[Tensor, " H"]  # weight of the drafter's last norm


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a micro-batch as the loss takes them (`dflash.model.loss.block_loss`)."""

    labels: Int[Tensor, "B A K"]
    weights: Float[Tensor, "B A K"]
    kind: LossKind
    states: Float[Tensor, "B A K H"] | None
    counted: Int[Tensor, " n"]
    selector_weight: float


class LookBack(Part):
    """A head that sees the token before a slot. Subclasses say how state and token meet, and what is trained."""

    name: ClassVar[str]  # of the part in published checkpoints

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.free = shape.tables == "free"
        if not self.free:
            self.before = nn.Linear(shape.hidden_size, shape.rank, bias=False)
            self.after = nn.Linear(shape.rank, shape.hidden_size, bias=False)

    def start(self, generator: torch.Generator) -> None:
        if self.free:
            first, second = self.tables()
            nn.init.normal_(first, std=0.02, generator=generator)
            nn.init.zeros_(second)
        else:
            # Entries of RMSNorm(E)·A are then about 1, and B alone has to grow.
            nn.init.normal_(self.before.weight, std=self.before.in_features**-0.5, generator=generator)
            nn.init.zeros_(self.after.weight)

    def tables(self) -> tuple[Tensor, Tensor]:
        """The free tables `[V, r]`: of the token before, and of the tokens to choose from."""
        raise NotImplementedError

    def meet(self, hidden: Float[Tensor, "*n H"], read: Float[Tensor, "*n r"]) -> Float[Tensor, "*n r"]:
        """What state and token before say together, in the tables' rank."""
        raise NotImplementedError

    def loss(
        self, hidden: Float[Tensor, "B A K H"], read: Float[Tensor, "B A K r"], ends: Ends, slots: Slots
    ) -> BlockLoss:
        """The loss of a micro-batch with this part; `read` is what the tables say of the tokens before."""
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "n H"], previous: Int[Tensor, " n"], ends: Ends) -> Float[Tensor, "n V"]:
        """The corrected logits, of which drafts are drawn; −∞ where a token is out of the question."""
        raise NotImplementedError

    def read(self, previous: Int[Tensor, "*n"], embedding: nn.Module) -> Float[Tensor, "*n r"]:
        """W1[previous]."""
        if self.free:
            return F.embedding(previous, self.tables()[0])
        with torch.no_grad():
            embedded = embedding(previous).to(self.before.weight.dtype)
            embedded = F.rms_norm(embedded, embedded.shape[-1:], eps=1e-12)
        return cast("Tensor", self.before(embedded))

    def vector(self, hidden: Float[Tensor, "*n H"], read: Float[Tensor, "*n r"], ends: Ends) -> Float[Tensor, "*n w"]:
        """v: as wide as the rows of `table`."""
        met = self.meet(hidden, read)
        return met if self.free else ends.norm * self.after(met)

    def table(self, head: Head) -> Float[Tensor, "V w"]:
        """T, without the scale of the head."""
        return self.tables()[1] if self.free else head.weight

    def table_scale(self, head: Head) -> float:
        """What T·v is multiplied by: the head's scale where T is the head."""
        return 1.0 if self.free else head.scale

    @torch.no_grad()
    def written_out(self, ends: Ends) -> tuple[Float[Tensor, "V r"], Float[Tensor, "V r"]]:
        """W1 and W2 in float32, which give the same logits as the frozen form."""
        if self.free:
            first, second = self.tables()
            return first.float(), second.float()
        ids = torch.arange(ends.head.weight.shape[0], device=ends.head.weight.device)
        first = torch.cat([self.read(piece, ends.embedding) for piece in torch.split(ids, _ROWS)])
        mixed = (ends.norm[:, None] * self.after.weight).float()
        second = torch.cat([rows.float() @ mixed for rows in torch.split(ends.head.weight, _ROWS)]) * ends.head.scale
        return first.float(), second


def previous_tokens(labels: Int[Tensor, "*n K"]) -> Int[Tensor, "*n K"]:
    """For slot k the token of slot k − 1, as the row has it; slot 0, which drafts nothing, gets its own."""
    return torch.cat([labels[..., :1], labels[..., :-1]], dim=-1).clamp(min=0).long()
