"""The target's LM head: final hidden states → logits, whole or in tiles of the vocabulary."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash.model.few_rows import linear


@dataclass(frozen=True, slots=True)
class Head:
    """The target's LM head: `softcap((weight · hidden + bias) · scale)`."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None = None
    softcap: float | None = None
    scale: float = 1.0
    unknown: Bool[Tensor, " V"] | None = (
        None  # ids that the tokenizer lacks: `logits` gives them −inf, the loss does not
    )

    def logits(self, hidden: Float[Tensor, "*n H"]) -> Float[Tensor, "*n V"]:
        """The target's logits of final hidden states, in the head's own dtype, rounded where the target rounds."""
        logits = self._finish(linear(hidden.to(self.weight.dtype), self.weight, self.bias))
        return logits if self.unknown is None else logits.masked_fill(self.unknown, -torch.inf)

    def tile(self, hidden: Float[Tensor, "n H"], start: int, stop: int) -> Float[Tensor, "n stop-start"]:
        """Logits of a range of the vocabulary, at least float32."""
        bias = None if self.bias is None else self.bias[start:stop]
        raw = torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight[start:stop], bias)
        return self._finish(raw.to(at_least_float32(raw.dtype)))

    def rows(self, start: int, stop: int) -> Float[Tensor, "stop-start H"]:
        """∂ raw logit / ∂ hidden for a range of the vocabulary."""
        return self.weight[start:stop]

    def rows_at(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n H"]:
        """The same for single ids."""
        return self.weight[ids]

    def slope(self, logits: Tensor) -> Tensor | None:
        """∂ logit / ∂ raw where the cap bends it, d tanh = 1 − tanh²; None where it does not."""
        return None if self.softcap is None else 1 - (logits / self.softcap).square()

    def to(self, dtype: torch.dtype) -> "Head":
        """The head in another dtype; rows that are the embedding's are copied, not changed."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def _finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
