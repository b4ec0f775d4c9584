"""Everything that a GPU compiles, before the processes of a run wait for each other in a step.

Kernels are compiled for one row and for several, with gradients and, where τ is measured, without. Compiled in a step,
each form would hold up all processes, at different steps.
"""

import logging
import time

import numpy as np
import torch

from dflash.pipeline.train_plan import TrainPlan
from dflash.target.frozen import Target
from dflash.training.room import features_of
from dflash.training.step import Trainer

log = logging.getLogger(__name__)


def warm_up(plan: TrainPlan, target: Target, trainer: Trainer, *, evaluates: bool) -> None:
    """A pass of one row and one of two, forward and backward; the trainer is left as it was."""
    start = time.perf_counter()
    for rows in shape_classes(plan):
        item = features_of(plan, target, trainer, rows)
        trainer.accumulate(item)
        if evaluates:
            with torch.no_grad():
                trainer.accumulate(item)
    trainer.forget()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    log.info("warmed up in %.1f s", time.perf_counter() - start)


def shape_classes(plan: TrainPlan) -> list[np.ndarray]:
    """Rows of one pass for each form: the shortest row that has slots, and the two shortest."""
    rows = plan.epoch(0).row_ids.astype(np.int64)
    rows = rows[plan.row_slots[rows] > 0]
    shortest = rows[np.argsort(plan.row_tokens[rows], kind="stable")][:2]
    return [shortest[:count] for count in range(1, shortest.size + 1)]
