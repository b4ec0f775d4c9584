"""Learning rate as a function of progress through the whole plan, so that no other epoch has to be planned.

progress = (epoch + step / steps in this epoch) / epochs
"""

import math


def progress(epoch: int, step: int, steps_in_epoch: int, epochs: int) -> float:
    """Share of the plan that is done before step `step` (from 0) of epoch `epoch` (from 0)."""
    return (epoch + step / steps_in_epoch) / epochs


def learning_rate(done: float, *, peak: float, floor: float, warmup: float) -> float:
    """Linear from 0 to `peak` over the first `warmup` share, then half a cosine down to `floor`, and `floor` after."""
    if done < warmup:
        return peak * done / warmup
    if done >= 1.0:
        return floor
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * (done - warmup) / (1.0 - warmup)))
