"""Speculative decoding: the drafter proposes a block, one target pass checks it, the target's own choice is emitted.

Every emitted token is the target's: its argmax at temperature 0, else a draw from its own law. A draft is accepted when
it equals that choice, so the law of the output is the target's for any drafter.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.drafter import ContextState, Drafter
from dflash.loss import Head
from dflash.target import Target
from dflash.trainer import embed_blocks

Choose = Callable[[Float[Tensor, "n V"]], Int[Tensor, " n"]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer. `emitted` holds the tokens of each target pass after the prompt's own, which gave the first token."""

    ids: tuple[int, ...]
    emitted: tuple[int, ...]  # tokens by pass: accepted drafts and the bonus token
    accepted: tuple[int, ...]  # drafts that were accepted, by pass
    gaps: tuple[float, ...]  # how far the chosen logit was above the best other one; only in plain decoding
    seconds: float

    @property
    def tau(self) -> float:
        """Mean tokens emitted by a target pass, bonus token included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The target's law: temperature 0 is greedy; top-k (0: all), then top-p cut the law before it is drawn from."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def law(self, logits: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Probabilities that `choose` draws from, temperature > 0."""
        logits = logits.float() / self.temperature
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

    def chooser(self, seed: int) -> Choose:
        """Logits → one token id for each row of them."""
        if self.temperature == 0.0:
            return lambda logits: logits.argmax(-1)
        generator = torch.Generator().manual_seed(seed)
        return lambda logits: torch.multinomial(self.law(logits).cpu(), 1, generator=generator).squeeze(1)


def plain(
    target: Target, prompt: Int[Tensor, " S"], *, max_new_tokens: int, stop_ids: frozenset[int], choose: Choose
) -> Decoded:
    """The target alone, one token a pass."""
    start = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    ids: list[int] = []
    gaps: list[float] = []
    pending = prompt
    while len(ids) < max_new_tokens and not (ids and ids[-1] in stop_ids):
        logits, _ = target.forward(pending[None].to(target.device), cache)
        ids.append(int(choose(logits[0, -1:])))
        others = logits[0, -1].clone()
        others[ids[-1]] = -torch.inf
        gaps.append(float(logits[0, -1, ids[-1]] - others.max()))
        pending = torch.tensor(ids[-1:])
    rounds = max(0, len(ids) - 1)
    return Decoded(tuple(ids), (1,) * rounds, (0,) * rounds, tuple(gaps), time.perf_counter() - start)


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    prompt: Int[Tensor, " S"],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    choose: Choose,
) -> Decoded:
    """Decode with the drafter's help: exactly `max_new_tokens` tokens, or up to a stop token.

    The caches hold confirmed positions only: after each pass the target's is cropped behind the accepted drafts, the
    drafter's grows by the target's features of the same positions.
    """
    start = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    logits, features = target.forward(prompt[None].to(target.device), cache)
    context = drafter.context(features)
    ids = [int(choose(logits[0, -1:]))]
    emitted: list[int] = []
    accepted: list[int] = []
    while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
        anchor = prompt.numel() + len(ids) - 1
        drafts = draft(drafter, ends, context, ids[-1], anchor)[: max_new_tokens - len(ids) - 1]
        logits, features = target.forward(torch.tensor([ids[-1:] + drafts]).to(target.device), cache)
        chosen = choose(logits[0]).tolist()
        right = 0
        while right < len(drafts) and drafts[right] == chosen[right]:
            right += 1
        new = chosen[: right + 1]
        stop = next((i for i, token in enumerate(new) if token in stop_ids), len(new) - 1)
        new = new[: stop + 1]
        ids += new
        emitted.append(len(new))
        accepted.append(min(right, len(new)))
        if right < len(drafts):
            cache.crop(right - len(drafts))  # a negative number removes that many positions
        context = _append(context, drafter.context(features[:, : right + 1], torch.tensor([anchor])))
    return Decoded(tuple(ids), tuple(emitted), tuple(accepted), (), time.perf_counter() - start)


def draft(
    drafter: Drafter, ends: tuple[nn.Module, Head], context: list[ContextState], token: int, anchor: int
) -> list[int]:
    """The drafter's K − 1 most likely tokens after `token` at position `anchor`."""
    embedding, head = ends
    shape, device = drafter.shape, drafter.fc.weight.device
    tokens = torch.tensor([[token]], device=device)
    embedded = embed_blocks(embedding, tokens, shape.block_size, shape.mask_token_id)
    hidden = drafter.blocks(context, embedded.to(drafter.fc.weight.dtype), torch.tensor([[anchor]], device=device))
    drafts: list[int] = head.logits(hidden[0, 0, 1:]).argmax(-1).tolist()
    return drafts


def _append(context: list[ContextState], new: list[ContextState]) -> list[ContextState]:
    return [
        ContextState(torch.cat([old.key, more.key], dim=1), torch.cat([old.value, more.value], dim=1))
        for old, more in zip(context, new, strict=True)
    ]
