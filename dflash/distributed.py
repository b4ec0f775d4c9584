"""Several processes of one run: `torchrun` starts them, `torch.distributed` adds up what each has computed.

Each process has its own readers, targets and a replica of the drafter; the micro-batches of a step are dealt among
them. The first one (the leader) writes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.interrupt import Interrupted

T = TypeVar("T")

HANG_S = 900.0  # a process none of whose stages has finished an item for so long ends itself (pipeline/watchdog.py)
# Of a step's sums: longer than a compiler or a disk holds up one process, and a lost machine holds up the others.
_TIMEOUT = timedelta(seconds=600)
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
    sums: dist.ProcessGroup | None = None  # all of them, over what their devices speak; None: gloo, as all else

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def summing_on(self, device: torch.device) -> "Ranks":
        """These processes, whose steps are summed on `device` from now on; all of them call it."""
        if self.size == 1:
            return self
        kind = backend(device)
        # Bound to its device, NCCL connects here, and not in the first step, and never guesses the device from a rank.
        bound = device if kind == "nccl" else None
        return replace(self, sums=dist.new_group(timeout=_TIMEOUT, backend=kind, device_id=bound))

    def add(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.sums)

    def wait(self) -> None:
        """Return when all processes are here, however long one of them works."""
        if self.size > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank; waits like `wait`."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values


ALONE = Ranks()


def backend(device: torch.device) -> str:
    """What sums tensors on `device`: a run on the CPU of a machine with GPUs is summed by gloo."""
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that `torchrun` has started, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    # A process that fails keeps its connections until it is gone, and so until it has said why: their end is what the
    # others fail with.
    try:
        yield Ranks(rank, size, local_rank, local_size)
    except Interrupted:  # by all of them, at one step
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()
