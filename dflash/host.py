"""What this process may use: cores, and free memory of a device."""

import os
from pathlib import Path

import torch


def cpu_threads() -> int:
    """Threads of each stage on the CPU: $OMP_NUM_THREADS where it is set, else the cores this process may use.

    Stages that compute on the same cores take turns, so each may have them all.
    """
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0))


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody holds; of the host, what can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
