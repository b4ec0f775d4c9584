"""Whether the processes of a run still have one drafter: they start from one and add the same sums.

A broken GPU, an unequal library or a checkpoint read halfway makes them part without a word, and the sums of their
gradients then train a meaningless average.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from dflash.distributed import Ranks
from dflash.errors import StageFailed

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def weights_sum(weights: Iterable[Tensor]) -> int:
    """The bits of all weights, added up as whole numbers: one read of them, on their own device."""
    sums = [weight.detach().view(_BITS[weight.element_size()]).sum(dtype=torch.int64) for weight in weights]
    return sum((2 * place + 1) * value for place, value in enumerate(torch.stack(sums).tolist()))


def compare_replicas(ranks: Ranks, weights: Iterable[Tensor], steps: int) -> None:
    """Raises StageFailed, on all processes, with the number of the one that has other weights or another step."""
    if ranks.size == 1:
        return
    found = ranks.gather((steps, weights_sum(weights)))
    count = Counter(found)
    common = max(found, key=lambda one: (count[one], one == found[0]))  # where there is no majority, the leader's
    others = [rank for rank, one in enumerate(found) if one != common]
    if others:
        said = "; ".join(f"process {rank}: step {found[rank][0]}, sum {found[rank][1]:x}" for rank in others)
        raise StageFailed(
            f"the drafters of {len(others)} of {ranks.size} processes are not that of the others (step {common[0]}, "
            f"sum {common[1]:x}): {said}. Nothing since the last checkpoint counts. Look at the GPU and the versions "
            "of these processes (history.jsonl, nvidia-smi -q -d ECC), then run again to go on from that checkpoint."
        )
