"""The law that tokens are drawn from, and which drafts keep it: speculative sampling (arXiv 2211.17192, algorithm 1).

    draft d ~ q;  accept with min(1, p(d)/q(d));  at the first rejection draw from max(p − q, 0), normalised

p is the target's law after the tokens before it, q the drafter's of that slot, both cut by the same temperature, top-k
and top-p. The emitted token then has law p whatever q is. Temperature 0 is the same with one-hot laws: a draft is
accepted when it is the target's argmax.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Dice(Protocol):
    """Where chance comes from: a generator in use, every outcome in turn in a proof."""

    def draw(self, law: Float[Tensor, "n V"]) -> Int[Tensor, " n"]:
        """One token from each law."""
        ...

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...


class SeededDice:
    """A row's own generator, so that its text does not depend on the rows decoded beside it."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, law: Float[Tensor, "n V"]) -> Int[Tensor, " n"]:
        """One token from each law."""
        return torch.multinomial(law, 1, generator=self._generator).squeeze(-1)

    def accept(self, probability: float) -> bool:
        """True with this probability: a uniform number of [0, 1) is below it."""
        return float(torch.rand((), generator=self._generator, device=self._generator.device)) < probability


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one row, and the laws they were drawn from; None at temperature 0."""

    tokens: tuple[int, ...]
    law: Float[Tensor, "n V"] | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy; else logits / temperature, then top-k (0: all), then top-p (1: all)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def law(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Probabilities at a temperature above 0, in float32 or better."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        law = logits.softmax(-1)
        if self.top_p < 1.0:
            ordered, order = law.sort(dim=-1, descending=True)
            # A token stays when what is above it has not reached top_p: the most likely one always does.
            stays = torch.zeros_like(law, dtype=torch.bool).scatter(
                -1, order, ordered.cumsum(-1) - ordered < self.top_p
            )
            law = law.masked_fill(~stays, 0.0)
            law = law / law.sum(-1, keepdim=True)
        return law

    def choose(self, logits: Float[Tensor, "*n V"], dice: Dice) -> Int[Tensor, "*n"]:
        """A token from each row of logits."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        law = self.law(logits)
        return dice.draw(law.flatten(0, -2)).view(law.shape[:-1])

    def propose(self, logits: Float[Tensor, "n V"], dice: Dice) -> Proposal:
        """Drafts from the drafter's logits of its slots."""
        if self.temperature == 0.0:
            return Proposal(tuple(logits.argmax(-1).tolist()), None)
        law = self.law(logits)
        return Proposal(tuple(dice.draw(law).tolist()), law)

    def verify(self, logits: Float[Tensor, "n+1 V"], proposal: Proposal, dice: Dice) -> tuple[int, int]:
        """How many drafts are accepted, and the token that follows them, from the target's logits after each."""
        drafts = proposal.tokens
        if proposal.law is None:
            chosen = logits.argmax(-1).tolist()
            accepted = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
            return accepted, chosen[accepted]
        law = self.law(logits)
        # The ratio is made from the very numbers that the draft was drawn with: another dtype would bend the law.
        at = torch.tensor(drafts, dtype=torch.long, device=law.device)[:, None]
        ratios = (law[: len(drafts)].gather(1, at) / proposal.law.gather(1, at)).squeeze(1).tolist()
        accepted = next((i for i, ratio in enumerate(ratios) if not dice.accept(min(1.0, ratio))), len(drafts))
        last = law[accepted]
        if accepted < len(drafts):
            last = residual(last, proposal.law[accepted])
        return accepted, int(dice.draw(last[None]))


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """max(p − q, 0), normalised; p itself where rounding leaves nothing, as when p = q."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else p
