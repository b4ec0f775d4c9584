"""What a token costs the target and a slot the drafter, measured on a few passes before the stages run side by side."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from cache.batches.gather import Buffers
from dflash.batch import Position
from dflash.distributed import Ranks
from dflash.host import free_bytes
from dflash.pipeline.device import Lane, Stopwatch, receive
from dflash.pipeline.train_plan import TrainPlan
from dflash.target.frozen import Target
from dflash.target.placement import Devices, best_processes
from dflash.training.checkpoint import State
from dflash.training.step import Trainer

_PROBED = 4  # passes


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of each stage: of the target a token, of the drafter a slot, padding included."""

    token: float
    slot: float


def stage_seconds(
    plan: TrainPlan,
    target: Target,
    trainer: Trainer,
    work: Iterable[tuple[Position, np.ndarray]],
    after: Callable[[], object],
) -> StageSeconds | None:
    """Run target and drafter in turn; `after` ends each pass: a step, or forgetting that it was there.

    The first one warms up and does not count; None when there is no second one.
    """
    lane, watch = Lane(target.devices, trainer.device), Stopwatch(target.devices[-1])
    buffers = Buffers(plan.buffer_tokens)
    times: list[tuple[float, float, int, int]] = []
    for position, row_ids in work:
        batch = plan.make_batch(position, row_ids, buffers)
        start = time.perf_counter()
        item = lane.carry(batch, target.features, watch, lambda: None)
        receive(item, trainer.device)
        _wait(trainer.device)
        middle = time.perf_counter()
        trainer.accumulate(item)
        after()
        _wait(trainer.device)
        times.append((middle - start, time.perf_counter() - middle, batch.padded, batch.padded_slots))
    if len(times) < 2:
        return None
    target_s, train_s, tokens, slots = (sum(values) for values in zip(*times[1:], strict=True))
    return StageSeconds(target_s / tokens, train_s / slots)


def decide(
    devices: Devices, plan: TrainPlan, target: Target, trainer: Trainer, start: State, ranks: Ranks
) -> tuple[Devices, dict[str, Any]]:
    """Where the targets go after all, and why: from seconds of a few passes, which leave no trace."""
    seconds = None
    if devices.undecided:
        work = plan.passes(start.epoch, start.step, start.epoch + 1)
        seconds = stage_seconds(plan, target, trainer, islice(work, _PROBED), trainer.forget)
    if seconds is None:
        return devices, devices.to_json()
    count = ranks.local_size * (len(devices.targets) + 1)  # of the machine: the drafter's is no target's yet
    facts = dict(zip(("target_s", "drafter_s"), step_seconds(plan, seconds, start.epoch), strict=True))
    if _fits(target, devices.drafter, trainer.claim_bytes):
        devices = devices.decided(**facts)
    return devices, devices.to_json() | facts | {"best_processes": best_processes(count, **facts)}


def step_seconds(plan: TrainPlan, seconds: StageSeconds, epoch: int = 0) -> tuple[float, float]:
    """Seconds of one step of this epoch, on average, on one target and on one drafter."""
    rows, steps = plan.epoch(epoch).row_ids, plan.steps(epoch)
    tokens, slots = int(plan.row_tokens[rows].sum()), int(plan.row_slots[rows].sum(dtype=np.int64))
    return seconds.token * tokens / steps, seconds.slot * slots / steps


def _fits(target: Target, device: torch.device, claim_bytes: int) -> bool:
    """Whether a device has room for what the target and its work hold on its own, beside what is claimed already."""
    return device.type != "cuda" or torch.cuda.max_memory_reserved(target.device) <= free_bytes(device) - claim_bytes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
