"""Several processes of one run: `torchrun` starts them, `torch.distributed` adds up what each has computed.

Each process has its own readers, targets and a replica of the drafter; the micro-batches of a step are dealt among
them. The first one (the leader) writes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.interrupt import Interrupted

T = TypeVar("T")

HANG_S = 900.0  # a process none of whose stages has finished an item for so long ends itself (pipeline/watchdog.py)
_TIMEOUT = timedelta(seconds=60)  # of a step's sums: a machine that is lost never holds up the others for longer
# Of `wait` and `gather`, where one process may have more to do than another: loading, evaluating, a slow disk. One that
# hangs has ended itself before, and one that dies is seen at once, by its closed connection.
_PATIENCE = timedelta(seconds=HANG_S + 300)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    patient: dist.ProcessGroup | None = None  # all of them, over gloo

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
        """Return when all processes are here, however long one of them works."""
        if self.size > 1:
            dist.barrier(self.patient)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank; waits like `wait`."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, self.patient)
        return values


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that `torchrun` has started, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    # The device of what is summed chooses: a run on the CPU of a machine with GPUs is summed by gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    # A process that fails keeps its connections until it is gone, and so until it has said why: their end is what the
    # others fail with.
    try:
        yield Ranks(rank, size, local_rank, local_size, dist.new_group(backend="gloo", timeout=_PATIENCE))
    except Interrupted:  # by all of them, at one step
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
