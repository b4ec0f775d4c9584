"""Held-out prompts decoded twice in one run: by the target alone, and with the drafter's help. What that says."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dflash.config import EvaluationConfig
from dflash.decoding.decode import Decoded, DecodeLimits, plain, speculate
from dflash.decoding.sampling import Sampling, SeededDice
from dflash.decoding.tau import RowWalk, acceptance_by_slot, tau
from dflash.distributed import ALONE, Ranks
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.target.frozen import Target


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded twice."""

    prompt: tuple[int, ...]
    group: str
    plain: Decoded
    speculative: Decoded

    @property
    def identical(self) -> bool:
        """Token for token the same."""
        return self.plain.ids == self.speculative.ids

    @property
    def near_tie(self) -> bool:
        """Whether the texts part at a token that rounding could as well have made the target's best."""
        pairs = zip(self.plain.ids, self.speculative.ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return first is not None and self.speculative.ids[first] in self.plain.ties[first]

    @property
    def walk(self) -> RowWalk:
        """The speculative passes, as teacher-forced τ has them."""
        return RowWalk(sum(self.speculative.emitted), self.speculative.accepted)


def compare(
    target: Target,
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    prompts: Sequence[tuple[str, Int[Tensor, " S"]]],
    config: EvaluationConfig,
    stop_ids: frozenset[int],
    on_prompt: Callable[[Decoded], None],
    ranks: Ranks = ALONE,
) -> list[Comparison]:
    """Decode each prompt (its group, its ids) both ways, one at a time; kind of cache, limits and seed are the same.

    Several processes deal the prompts among them, and all have all that came of it.
    """
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    _warm_up(target, drafter, ends, prompts[0][1], sampling)
    limits, compared = DecodeLimits(config.max_new_tokens, stop_ids), {}
    for index in range(ranks.rank, len(prompts), ranks.size):
        group, prompt = prompts[index]
        seed = config.seed + index
        alone = plain(target, prompt, limits, sampling, SeededDice(seed, target.device))
        dice = [SeededDice(seed, target.device)]
        (helped,) = speculate(target, drafter, ends, [prompt], limits, sampling, dice, config.confidence)
        compared[index] = Comparison(tuple(prompt.tolist()), group, alone, helped)
        on_prompt(helped)
    everywhere = {index: one for part in ranks.gather(compared) for index, one in part.items()}
    return [everywhere[index] for index in range(len(prompts))]


def _warm_up(
    target: Target, drafter: Drafter, ends: tuple[nn.Module, Head], prompt: Int[Tensor, " S"], sampling: Sampling
) -> None:
    """The first passes pay for what later ones find ready: neither way of decoding should."""
    dice = SeededDice(0, target.device)
    plain(target, prompt, DecodeLimits(2), sampling, dice)
    speculate(target, drafter, ends, [prompt], DecodeLimits(2), sampling, [dice])


def facts(compared: Sequence[Comparison], config: EvaluationConfig, block_size: int) -> dict[str, Any]:
    """What evaluation.json says of decoding."""
    identical = sum(one.identical for one in compared)
    near_ties = sum(one.near_tie for one in compared)
    alone = _tokens_per_s([one.plain for one in compared])
    helped = _tokens_per_s([one.speculative for one in compared])
    groups = sorted({one.group for one in compared})
    return {
        "prompts": len(compared),
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "identical": identical,
        "near_ties": near_ties,
        # Two draws of one law need not agree: at a temperature above 0 the texts say nothing about losslessness.
        "lossless": identical + near_ties == len(compared) if config.temperature == 0 else None,
        **_acceptance(compared),
        "accepted_by_slot": acceptance_by_slot([one.walk for one in compared], block_size),
        "by_group": {group: _acceptance([one for one in compared if one.group == group]) for group in groups},
        "plain_tokens_per_s": alone,
        "speculative_tokens_per_s": helped,
        "speedup": helped / alone,
    }


def _acceptance(compared: Sequence[Comparison]) -> dict[str, Any]:
    walks = [one.walk for one in compared]
    passes = sum(len(walk.accepted) for walk in walks)
    return {
        "tau": finite(tau(walks).value),
        "accepted_per_round": sum(sum(walk.accepted) for walk in walks) / passes if passes else None,
        "rounds": passes,
        "answers": len(compared),
    }


def _tokens_per_s(decoded: Sequence[Decoded]) -> float:
    return sum(len(one.ids) for one in decoded) / sum(one.seconds for one in decoded)


def finite(value: float) -> float | None:
    """JSON has no nan: None stands for what cannot be said."""
    return value if math.isfinite(value) else None


def sample(compared: Comparison, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A decoded answer in runs: the tokens of one target pass each, the first of them given by the prompt's pass."""
    texts = token_texts(tokenizer, compared.speculative.ids)
    runs: list[dict[str, Any]] = [{"text": texts[0], "accepted": 0, "tokens": texts[:1]}]
    position = 1
    for count, accepted in zip(compared.speculative.emitted, compared.speculative.accepted, strict=True):
        tokens = texts[position : position + count]
        runs.append({"text": "".join(tokens), "accepted": accepted, "tokens": tokens})
        position += count
    return {"prompt": tokenizer.decode(list(compared.prompt)), "group": compared.group, "runs": runs}


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. A letter made of several tokens stands at its last one."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:end]))
        if end < len(ids) and text.endswith("\ufffd"):
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        shown = text
    return texts
