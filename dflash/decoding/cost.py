"""What a pass over n tokens costs on this machine, and from which τ on a drafter pays here.

A round costs the drafter's block and a target pass over K tokens, and emits τ tokens; alone, the target pays one pass
over one token for each. So decoding is faster where

    τ > (block + pass(K)) / pass(1)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dflash.decoding.decode import Context, Row, propose
from dflash.decoding.rollback import RowCache
from dflash.decoding.sampling import Sampling, SeededDice
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.target.frozen import Target

REPEATS = 3  # the shortest counts: other work on the machine only adds


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the parts of a round."""

    passes: tuple[float, ...]  # of a target pass over 1, 2, …, K tokens
    block: float  # of the drafter: its block, K − 1 drafts, and the features of a pass

    @property
    def break_even(self) -> float:
        """The τ at which a round costs what its tokens cost one by one."""
        return (self.block + self.passes[-1]) / self.passes[0]


@torch.no_grad()
def measure_cost(target: Target, drafter: Drafter, ends: tuple[nn.Module, Head], prompt: Int[Tensor, " S"]) -> Cost:
    """Each part behind a prompt, after it has run once; on a GPU its work is waited for."""
    size = drafter.shape.block_size
    cache = RowCache(target, [prompt])
    _, features = cache.prefill()
    context = Context(drafter, 1, features.shape[1] + size)
    start = torch.zeros(1, dtype=torch.long)
    context.write(features, start)
    row = Row(0, prompt.numel(), int(prompt[-1]), size, SeededDice(0, target.device))
    ids = prompt[-1:].repeat(size)[None].to(target.device)

    def check(count: int) -> None:
        cache.extend(ids[:, :count])
        cache.keep([0], count)  # nothing of it stays

    def draft() -> None:
        context.write(features[:, -size:], start)
        propose(drafter, ends, context.states, [row], Sampling(), 0.0)

    passes = tuple(_seconds(target, lambda count=count: check(count)) for count in range(1, size + 1))  # type: ignore[misc]
    return Cost(passes, _seconds(target, draft))


def _seconds(target: Target, work: Callable[[], None]) -> float:
    taken = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        for device in target.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
