"""`python -m dflash check --assume`: layouts, days and memory on a machine that is not here; needs no weights, no GPU.

What is assumed and not measured says so: seconds follow from the operations of the shapes and a share of the GPU's
peak that such products reach, or are given; bytes of activations are counted from the shapes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.config import RunConfig
from dflash.errors import ConfigMismatch
from dflash.model.drafter import Drafter, DrafterShape
from dflash.run_directory import CONFIG
from dflash.training.gpu_layouts import layouts, table
from dflash.training.open_run import OpenRun, open_run
from dflash.training.room import estimated_bytes, room_for

_REACHED = {"target": 0.55, "drafter": 0.45}  # of the peak; not measured here
_SLACK = 3e9  # bytes of a GPU: its context, compiled kernels, tiles of logits


@dataclass(frozen=True, slots=True)
class Assumed:
    """A machine. Seconds of a token and a slot are estimated where they are not given; `rows` scales the rows."""

    gpus: int = 1
    memory_gb: float = 141.0
    tflops: float = 989.0  # dense bfloat16
    target_us: float | None = None  # microseconds of the target a token
    drafter_us: float | None = None  # of the drafter a slot
    rows: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Assumed":
        """`gpus=8,memory_gb=80`. Raises ConfigMismatch for other names, or values that are no numbers."""
        try:
            given = dict(part.split("=", 1) for part in text.split(",") if part)
            known = {name: int(given.pop(name)) for name in ("gpus", "rows") if name in given}
            return cls(**known, **{name: float(value) for name, value in given.items()})  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            names = ", ".join(cls.__slots__)
            raise ConfigMismatch(f"--assume {text}: expected NAME=NUMBER,… with names of {names}.") from error


@dataclass(frozen=True, slots=True)
class _Work:
    """Of all epochs, padding left out."""

    tokens: float
    slots: float


def assumed(path: Path, tokens: Path, machine: Assumed, config_name: str = CONFIG) -> str:
    """What `check` would say on that machine, as text."""
    opened = open_run(path, tokens, config_name)
    plan = opened.plan()
    rows = opened.store.rows(0)
    epochs, more = opened.config.training.epochs, (machine.rows or rows.size) / rows.size
    work = _Work(
        epochs * more * int(plan.row_tokens[rows].sum(dtype="int64")),
        epochs * more * int(plan.row_slots[rows].sum(dtype="int64")),
    )
    target_s, drafter_s, said = _seconds(opened, machine, work)
    gpus = f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of {machine.memory_gb:.0f} GB"
    lines = [
        f"assumed: {gpus}, {round(more * rows.size):,} rows, {epochs} epochs, {work.tokens:.3g} tokens, "
        f"{work.slots:.3g} slots; {said}",
        *_memory(opened, machine),
        table(layouts(machine.gpus, target_s, drafter_s)),
    ]
    return "\n".join(lines)


def _seconds(opened: OpenRun, machine: Assumed, work: _Work) -> tuple[float, float, str]:
    """Of all the target's work on one GPU and all the drafter's, and where they come from."""
    rate = {name: machine.tflops * 1e12 * share for name, share in _REACHED.items()}
    t = opened.flops.target_token / rate["target"] if machine.target_us is None else machine.target_us / 1e6
    d = opened.flops.drafter_slot / rate["drafter"] if machine.drafter_us is None else machine.drafter_us / 1e6
    fixed = opened.flops.drafter_token / rate["drafter"] if machine.drafter_us is None else 0.0
    source = "given" if None not in (machine.target_us, machine.drafter_us) else "estimated from operations"
    said = f"t = {t * 1e6:.2f} µs a token, d = {d * 1e6:.2f} µs a slot, {source}"
    return t * work.tokens, d * work.slots + fixed * work.tokens, said


def _memory(opened: OpenRun, machine: Assumed) -> list[str]:
    """The largest pass that fits a GPU, with and without a target beside the drafter."""
    kept, lines = estimated_bytes(opened.shape, opened.config.training.recompute), []
    for name, target in (("drafter alone", 0.0), ("target beside it", target_bytes(opened.config, opened))):
        fixed = fixed_bytes(opened.shape, target)
        room = room_for(kept, 0.75 * 0.9 * (machine.memory_gb * 1e9 - fixed))
        if room is None:
            lines.append(f"memory, {name}: {fixed / 1e9:.1f} GB before the first pass (estimated): does not fit")
            continue
        peak = fixed + kept.of(room.tokens, room.slots)
        lines.append(
            f"memory, {name}: {fixed / 1e9:.1f} GB + {kept.of(room.tokens, room.slots) / 1e9:.1f} GB for a pass of "
            f"{room.slots:,} slots and {room.tokens:,} tokens = {peak / 1e9:.1f} GB (estimated), the rest for features"
        )
    return lines


def fixed_bytes(shape: DrafterShape, target_bytes: float = 0.0) -> float:
    """What a drafter's GPU holds before its first pass, beside a target or the target's embedding and head alone."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Drafter(shape).parameters())
    ends = 2.0 * shape.vocab_size * shape.hidden_size * 2
    return 18.0 * weights + max(ends, target_bytes) + _SLACK  # weights, gradient, two moments, copies in bfloat16


def target_bytes(config: RunConfig, opened: OpenRun) -> float:
    """Weights of the target, embedding and head included, from its operations a token."""
    width = 2 if config.target.dtype == "bfloat16" else 4
    depth = opened.shape.num_target_layers / (max(opened.shape.taps) + 1)
    if config.training.loss == "kl":
        depth = 1.0
    return width * (opened.flops.target_token / 2 * depth + 2 * opened.shape.vocab_size * opened.shape.hidden_size)
