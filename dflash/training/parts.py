"""The parts of a run, made in this order because each takes memory that the next one then does not have.

plan and devices, the first target, drafter and optimizer, where the other targets go, these, what may wait
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dflash.distributed import Ranks
from dflash.host import cpu_threads, free_bytes
from dflash.model.head import Head
from dflash.pipeline.feature_store import FeatureStore
from dflash.pipeline.pipeline import capacity
from dflash.pipeline.train_plan import TrainPlan
from dflash.target.frozen import Target
from dflash.target.placement import Devices, place
from dflash.training import checkpoint
from dflash.training.checkpoint import Checkpoint, State
from dflash.training.initial_drafter import first_checkpoint, load_drafter
from dflash.training.kept_features import open_features
from dflash.training.open_run import OpenRun
from dflash.training.room import fit_room
from dflash.training.stage_seconds import decide
from dflash.training.step import Trainer
from dflash.training.warm_up import warm_up

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """One process's parts of a run."""

    plan: TrainPlan
    start: State
    threads: int
    targets: list[Target]
    ends: tuple[nn.Module, Head]  # the target's embedding and head, on the drafter's device
    trainer: Trainer
    features: FeatureStore | None
    ahead: int  # passes whose features may wait for the drafter


def make_parts(opened: OpenRun, resumed: Checkpoint | None, ranks: Ranks, stop_asked: Callable[[], bool]) -> Parts:
    """Load and place everything; a new run gets its first checkpoint here."""
    plan = opened.plan(ranks)
    threads = resumed.state.threads if resumed else cpu_threads()
    torch.set_num_threads(threads)
    devices = place(opened.config.target, ranks)
    devices.enter()
    ranks = ranks.summing_on(devices.drafter)
    log.info("loading the target %s", opened.config.target.model)
    target = opened.load_target(devices.targets[0])
    start = resumed or _first(opened, target, threads, ranks)
    ends = target.ends(devices.drafter)
    trainer = Trainer(
        load_drafter(opened.shape, start).to(devices.drafter), *ends, opened.config.training, ranks, stop_asked
    )
    trainer.load_optimizer_tensors(start.optimizer())
    room, measured = fit_room(plan, target, trainer)
    if ranks.leads:
        facts = {"slot_bytes": measured.slot, "token_bytes": measured.token} if measured else {}
        opened.run.record("room", pass_slots=room.slots, pass_tokens=room.tokens, **facts)
    log.info("a pass has at most %d slots and %d tokens", room.slots, room.tokens)
    if devices.drafter.type == "cuda":  # nothing is compiled on a CPU
        warm_up(plan, target, trainer, evaluates=opened.config.training.evaluate_every_steps is not None)
    devices = _decided(opened, devices, plan, target, trainer, start.state, ranks)
    targets = [target, *(opened.load_target(replica) for replica in devices.targets[1:])]
    features = open_features(opened, ranks) if opened.config.training.features == "reuse" else None
    item_bytes = plan.buffer_tokens * opened.feature_width * 2
    ahead = capacity(item_bytes, (free_bytes(devices.drafter) - trainer.claim_bytes) // 4, len(targets))
    log.info("features of at most %d passes at once: %.2f GB", ahead, ahead * item_bytes / 1e9)
    return Parts(plan, start.state, threads, targets, ends, trainer, features, ahead)


def _first(opened: OpenRun, target: Target, threads: int, ranks: Ranks) -> Checkpoint:
    """The checkpoint before the first step, which the leader writes and all read."""
    if ranks.leads:
        first_checkpoint(opened, target, threads)
    ranks.wait()
    return checkpoint.first(opened.run.checkpoints)


def _decided(
    opened: OpenRun, devices: Devices, plan: TrainPlan, target: Target, trainer: Trainer, start: State, ranks: Ranks
) -> Devices:
    devices, facts = decide(devices, plan, target, trainer, start, ranks)
    if ranks.leads:
        opened.run.record("placement", **facts)
        log.info("placement: %s", facts)
    return devices
