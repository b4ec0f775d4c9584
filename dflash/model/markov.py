"""DSpark's Markov head: the token before a slot shifts all of the slot's logits; and its confidence head.

U(c) += W2[c]·m,  m = W1[p] (vanilla) or σ(G·[h; W1[p]] + b)∘W1[p] (gated)          (arXiv 2607.05147)
confidence = σ(w·[h; W1[p]] + b), trained towards 1 − ½·Σ|q − p|: how likely the slot's draft is accepted
"""

import torch
from torch import Tensor, nn

from dflash.model.head import Head
from dflash.model.look_back import Ends, LookBack, Slots
from dflash.model.loss import BlockLoss, block_loss
from dflash.model.part import Part
from dflash.model.shape import DrafterShape
from dflash.model.table_head import TableHead


class MarkovHead(LookBack):
    """Tables: `markov_w1`, `markov_w2`."""

    name = "markov_head"

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        self.gate = nn.Linear(shape.hidden_size + shape.rank, shape.rank) if shape.markov == "gated" else None
        if self.free:
            self.markov_w1 = nn.Embedding(shape.vocab_size, shape.rank)
            self.markov_w2 = nn.Embedding(shape.vocab_size, shape.rank)

    def start(self, generator: torch.Generator) -> None:
        super().start(generator)
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=0.02, generator=generator)
            nn.init.zeros_(self.gate.bias)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.markov_w1.weight, self.markov_w2.weight

    def meet(self, hidden: Tensor, read: Tensor) -> Tensor:
        if self.gate is None:
            return read
        gate: Tensor = self.gate(torch.cat([hidden, read.to(hidden.dtype)], dim=-1))
        return torch.sigmoid(gate) * read

    def loss(self, hidden: Tensor, read: Tensor, ends: Ends, slots: Slots) -> BlockLoss:
        shifted, head = self._shifted(hidden, read, ends)
        return block_loss(shifted, head, slots.labels, slots.weights, slots.kind, slots.states, slots.counted)

    def logits(self, hidden: Tensor, previous: Tensor, ends: Ends) -> Tensor:
        shifted, head = self._shifted(hidden, self.read(previous, ends.embedding), ends)
        return head.logits(shifted)

    def _shifted(self, hidden: Tensor, read: Tensor, ends: Ends) -> tuple[Tensor, Head]:
        """States and the head that reads them: the target's where the tables are frozen."""
        vector = self.vector(hidden, read, ends)
        if not self.free:
            return hidden + vector, ends.head
        return torch.cat([hidden, vector.to(hidden.dtype)], dim=-1), TableHead.of(ends.head, self.tables()[1])


class ConfidenceHead(Part):
    """Detached from the drafter: its loss moves this head alone."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.proj = nn.Linear(shape.hidden_size + shape.rank, 1)

    def start(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, read: Tensor) -> Tensor:
        """Logits `[…]` of being accepted, from states `[…, H]` and W1 of the tokens before `[…, r]`."""
        seen = torch.cat([hidden.detach(), read.detach().to(hidden.dtype)], dim=-1)
        logits: Tensor = self.proj(seen).squeeze(-1)
        return logits
