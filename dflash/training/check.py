"""What a run will need and how long it will take: rows, steps, disk, memory, and time from a measured step."""

import resource
import shutil
from pathlib import Path
from typing import Any

import torch

from dflash.batch import Step
from dflash.config import RunConfig, TargetConfig
from dflash.distributed import Ranks
from dflash.host import cpu_threads, free_bytes
from dflash.model.drafter import Drafter
from dflash.pipeline.train_plan import TrainPlan
from dflash.run_directory import CONFIG, ProgressFile
from dflash.target.placement import Devices, place, replicas
from dflash.training import checkpoint
from dflash.training.gpu_layouts import Layout, layouts
from dflash.training.initial_drafter import new_drafter
from dflash.training.open_run import OpenRun, open_run
from dflash.training.room import estimated_bytes, fit_room
from dflash.training.stage_seconds import stage_seconds, step_seconds
from dflash.training.step import Trainer

_MEASURED = 4  # passes that are timed, after the one with the most slots, which warms up and fills the memory


def check(path: Path, tokens: Path, config_name: str = CONFIG) -> None:
    """Write plan.json: what is needed, what is there, and what does not fit.

    Raises what `open_run` does, and ConfigMismatch when the run's devices are not there.
    """
    opened = open_run(path, tokens, config_name)
    done = checkpoint.newest(opened.run.checkpoints)
    plan, training = opened.plan(), opened.config.training
    steps = [plan.steps(epoch) for epoch in range(training.epochs)]
    left = sum(steps) - (done.state.steps_total if done else 0)
    refusals = []
    try:
        measured = _measure(opened, plan)
    except torch.OutOfMemoryError as error:
        measured = _unmeasured(opened)
        need = estimated_bytes(opened.shape, opened.config.training.recompute).of(plan.room.tokens, plan.room.slots)
        refusals.append(
            f"memory: a pass of {plan.room.slots:,} slots keeps about {need / 1e9:.1f} GB (estimated) beside target, "
            f"drafter and optimizer, and the device has no room for it: {error}. Lower training.anchors, put the "
            "target on other devices (target.devices), or use a larger GPU."
        )
    parameters = measured["parameters"]
    features = opened.store.manifest.tokens * opened.feature_width * 2
    disk = {
        "checkpoints": (training.keep + 2) * parameters * 3 * 4,
        "features": features if training.features == "reuse" and not (path / "features").exists() else 0,
        "export": parameters * 4,
    }
    free = shutil.disk_usage(path).free
    if sum(disk.values()) > free:
        refusals.append(
            f"disk: {sum(disk.values()) / 1e9:.1f} GB needed in {path}, {free / 1e9:.1f} GB are free. "
            "Free some, lower training.keep, or set training.features=stream."
        )
    for device, need in measured["memory_bytes"].items():
        available = measured["available_memory_bytes"][device]
        if need > available:
            refusals.append(
                f"memory: {need / 1e9:.1f} GB needed on {device}, {available / 1e9:.1f} GB are available. "
                "Lower training.pass_slots."
            )
    seconds, gpus = measured["step_seconds"], measured["gpus"]
    found = layouts(gpus, left * seconds["target"], left * seconds["train"]) if seconds else []
    opened.run.write(
        "plan.json",
        {
            "rows": int(opened.store.rows(0).size),
            "held_out_rows": int(opened.store.rows(1).size),
            "epochs": training.epochs,
            "steps_per_epoch": steps[0],
            "steps": sum(steps),
            "steps_left": left,
            "disk_bytes": disk,
            "free_disk_bytes": free,
            "memory_bytes": measured["memory_bytes"],
            "available_memory_bytes": measured["available_memory_bytes"],
            "step_seconds": seconds,
            "seconds_total": _seconds_total(steps, left, seconds, opened.config, gpus) if seconds else 0.0,
            "gpus": gpus,
            "processes": _processes(opened.config, found),
            "evaluation_processes": _replicas(opened.config.target),
            "layouts": [layout.to_json() for layout in found],
            "pass_slots": plan.room.slots,
            "fits": not refusals,
            "refusals": refusals,
        },
    )


def _processes(config: RunConfig, found: list[Layout]) -> int:
    """Those that were asked for, else those of the fastest layout; named devices are one process's."""
    if config.training.processes is not None:
        return config.training.processes
    return found[0].processes if found and config.target.devices == "auto" else 1


def _seconds_total(steps: list[int], left: int, seconds: dict[str, float], config: RunConfig, gpus: int) -> float:
    """By the layout that will be run. Where features are reused, only what is left of the first epoch pays for the
    target."""
    with_target = max(0, left - sum(steps[1:])) if config.training.features == "reuse" else left
    target_s, train_s = with_target * seconds["target"], with_target * seconds["train"]
    processes = _processes(config, layouts(gpus, target_s, train_s))
    first = [one.seconds for one in layouts(gpus, target_s, train_s) if one.processes == processes]
    shared = target_s + train_s if not first else min(first)  # processes that no equal share of the GPUs is for
    return shared + (left - with_target) * seconds["train"] / processes


def _measure(opened: OpenRun, plan: TrainPlan) -> dict[str, Any]:
    """Run a few passes of the first epoch with the real parts, the largest first, and throw the result away."""
    config = opened.config
    torch.set_num_threads(cpu_threads())
    devices = place(config.target, _first_of(config))
    devices.enter()
    progress = ProgressFile(opened.run, "check", _MEASURED + 1, "passes")
    target = opened.load_target(devices.targets[0])
    drafter = new_drafter(opened.shape, config.drafter, target, config.training.seed).to(devices.drafter)
    trainer = Trainer(drafter, *target.ends(devices.drafter), config.training)
    fit_room(plan, target, trainer)
    by_slots = sorted(plan.passes(0, 0, 1), key=lambda item: int(plan.row_slots[item[1]].max()) * item[1].size)
    measured = [by_slots[-1], *(by_slots[len(by_slots) * i // _MEASURED] for i in range(_MEASURED))]

    def step() -> None:
        trainer.step(Step(0, 0, 1, 1)).report()
        progress.advance()

    seconds = stage_seconds(plan, target, trainer, measured, step)
    assert seconds is not None
    of_target, of_train = step_seconds(plan, seconds)
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "step_seconds": {"target": of_target, "train": of_train},
        "gpus": _gpus(config, devices),
        **_memory(devices.drafter, _first_of(config).local_size),
    }


def _gpus(config: RunConfig, devices: Devices) -> int:
    """Devices that layouts may share out."""
    if config.target.devices == "auto":
        return max(1, torch.cuda.device_count())
    return len(devices.targets) + devices.apart


def _replicas(config: TargetConfig) -> int:
    """How many whole targets this machine's GPUs hold side by side: an evaluation has a process for each."""
    if config.devices == "auto":
        return max(1, torch.cuda.device_count())
    named = replicas(config.devices)
    return len(named) if named[0][0].type == "cuda" else 1


def _unmeasured(opened: OpenRun) -> dict[str, Any]:
    """What is known of a run none of whose passes fits."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Drafter(opened.shape).parameters())
    gpus = max(1, torch.cuda.device_count())
    return {"parameters": parameters, "step_seconds": {}, "gpus": gpus} | {
        name: {} for name in ("memory_bytes", "available_memory_bytes")
    }


def _first_of(config: RunConfig) -> Ranks:
    """The first of the processes that this machine will run: the one that is measured."""
    processes = config.training.processes or (
        max(1, torch.cuda.device_count()) if config.target.devices == "auto" else 1
    )
    return Ranks(size=processes, local_size=processes)


def _memory(device: torch.device, processes: int) -> dict[str, Any]:
    """Peak memory of the measured steps, and what there is for them; the host's is shared by all processes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    available = free_bytes(torch.device("cpu")) + peak
    need, there = {"memory": processes * peak}, {"memory": available}
    if device.type == "cuda":
        free = free_bytes(device)
        held = torch.cuda.max_memory_reserved(device)
        need[str(device)], there[str(device)] = held, free + held
    return {"memory_bytes": need, "available_memory_bytes": there}
