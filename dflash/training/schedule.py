"""Learning rate as a function of progress through the whole plan, so that no other epoch has to be planned.

progress = (epoch + (step + ½) / steps in this epoch) / epochs

The middle of a step: the first one has a rate above 0, and the mean rate is the schedule's, however many steps there
are. With the step's end the last one would have the rate 0 instead.
"""

import math


def progress(epoch: int, step: int, steps_in_epoch: int, epochs: int) -> float:
    """Share of the plan that is done in the middle of step `step` (from 0) of epoch `epoch` (from 0)."""
    return (epoch + (step + 0.5) / steps_in_epoch) / epochs


def learning_rate(done: float, *, peak: float, floor: float, warmup: float) -> float:
    """Linear from 0 to `peak` over the first `warmup` share, then half a cosine down to `floor`, and `floor` after."""
    if done < warmup:
        return peak * done / warmup
    if done >= 1.0:
        return floor
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * (done - warmup) / (1.0 - warmup)))
