"""Curves for TensorBoard, in RUN/tensorboard beside metrics.jsonl, where the package `tensorboard` is installed.

A run that goes on from a checkpoint begins another file, and says in it from which step on the earlier ones no longer
count; TensorBoard then leaves those steps out. So nothing is rewritten, and the times stay those of the steps.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_MEASURED = ("loss", "coverage", "lr", "grad_norm", "padding", "skipped", "tokens_per_s")


class Curves:
    """The event file of one process."""

    def __init__(self, directory: Path, steps_done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.info("no curves for TensorBoard: the package tensorboard is not installed; metrics.jsonl has them all")
            self._writer = None
            return
        self._writer = SummaryWriter(str(directory), purge_step=steps_done + 1)

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Points after so many steps of the run; they are in the file when this returns."""
        if self._writer is not None:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()


def of_line(line: Mapping[str, Any]) -> dict[str, float | None]:
    """The points of a line of metrics.jsonl: what is measured, the accuracy by slot, the busy share by stage."""
    points = {name: line[name] for name in _MEASURED}
    points |= {f"accuracy/slot_{slot:02d}": share for slot, share in enumerate(line["accuracy_by_slot"], start=1)}
    return points | {f"busy/{stage}": shares["busy"] for stage, shares in line["stages"].items()}
