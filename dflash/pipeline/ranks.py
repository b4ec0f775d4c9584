"""Several processes of one run: `torchrun` starts them, `torch.distributed` adds up what each has computed.

Each process has its own readers, targets and a replica of the drafter; the micro-batches of a step are dealt among
them. The first one (the leader) writes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(seconds=60)  # a process that has failed never holds up the others for longer


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def add(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that `torchrun` has started, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    local = Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    try:
        yield local
    finally:
        dist.destroy_process_group()
