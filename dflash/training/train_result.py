"""What a part of a training run came to: train.json."""

import resource
from typing import Any

from dflash.pipeline.telemetry import bottleneck
from dflash.training.checkpoint import Checkpoint
from dflash.training.metrics import coverage_by_length, recent_loss
from dflash.training.open_run import OpenRun


def result(
    opened: OpenRun,
    done: Checkpoint,
    resumed: Checkpoint | None,
    stages: dict[str, Any] | None = None,
    shared: bool = False,
) -> dict[str, Any]:
    """What train.json says; `stages` are by default those of the last line of metrics.jsonl."""
    state, training = done.state, opened.config.training
    lines = list(opened.run.metric_lines())
    stages = stages or (lines[-1]["stages"] if lines else {})
    tokens = sum(line["tokens"] for line in lines)
    padded = sum(line["tokens"] / (1 - line["padding"]) for line in lines)
    slots = sum(line["slots"] for line in lines)
    padded_slots = sum(line["slots"] / (1 - line["padding_of_slots"]) for line in lines if line["slots"])
    reuse = training.features == "reuse"
    return {
        "finished": state.epoch >= training.epochs,
        "epochs_done": state.epoch,
        "epochs": training.epochs,
        "steps": state.steps_total,
        "loss_first": lines[0]["loss"] if lines else None,
        "loss": recent_loss(opened.run),
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_s": state.tokens / state.seconds if state.seconds else None,
        "padding": 1 - tokens / padded if padded else None,
        "padding_of_slots": 1 - slots / padded_slots if padded_slots else None,
        "coverage_by_length": {str(longest): share for longest, share in coverage_by_length(lines).items()},
        "skipped": sum(line["skipped"] for line in lines),
        "stages": stages,
        "bottleneck": bottleneck(stages, shared=shared, reuse=reuse),
        "resumed_from": resumed.path.name if resumed else None,
        "checkpoint": str(done.path),
        "best": state.best,
        "features_reused": reuse,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": state.threads,
    }
