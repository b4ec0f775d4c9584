"""How far one flow run trains: an absolute epoch and an absolute time, fixed once, so that a retry does not get more.

"One more epoch" asked again after a crash would be two. So the first attempt writes down where it ends (a persisted
result keyed by the flow run), and every later attempt of the same flow run reads it.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefect import task
from prefect.cache_policies import RUN_ID
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from dflash.training.until import end_of_window
from flows.runs.directory import Tree, epochs_done
from flows.runs.parameters import Parameters, resolve_home


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a flow run stops. None: the plan's own end, or no such limit."""

    until_epoch: int | None = None
    until_time: float | None = None  # seconds since 1970

    def arguments(self) -> Sequence[str]:
        """For `python -m dflash train`."""
        return [
            *([] if self.until_epoch is None else ["--until-epoch", str(self.until_epoch)]),
            *([] if self.until_time is None else ["--until-time", f"{self.until_time:.3f}"]),
        ]

    def why_reached(self, run: Path, epochs: int) -> str | None:
        """Why nothing may be trained in this flow run. None: train; also to say that a plan of `epochs` is done."""
        if self.until_time is not None and time.time() >= self.until_time:
            return f"its window ended at {datetime.fromtimestamp(self.until_time, UTC):%Y-%m-%d %H:%M:%S} UTC"
        if self.until_epoch is not None and epochs > self.until_epoch <= epochs_done(run):
            return f"the {self.until_epoch} epochs that it was to reach are done"
        return None


def fix_limits(parameters: Parameters) -> Limits:
    """The limits of this flow run: from its first attempt where there was one."""
    training = parameters.training
    if training.epochs_per_run is None and training.stop_after_s is None and training.until is None:
        return Limits()
    if FlowRunContext.get() is None:  # a plain call: there is no flow run that could be tried again
        return Limits(**compute_limits.fn(parameters))
    records = resolve_home(parameters.home) / "runs" / ".records"
    return Limits(**compute_limits.with_options(result_storage=records)(parameters))


@task(
    name="limits",
    task_run_name="limits {parameters.name}",
    cache_policy=RUN_ID,
    persist_result=True,
    result_serializer="json",
)
def compute_limits(parameters: Parameters) -> Tree:
    """The window runs from the scheduled start, so a run that starts late gets what is left of it."""
    training = parameters.training
    until_epoch = None
    if training.epochs_per_run is not None:
        until_epoch = min(epochs_done(parameters.run_directory) + training.epochs_per_run, training.epochs)
    scheduled = flow_run.scheduled_start_time or datetime.now(UTC)
    until_time = end_of_window(training, scheduled.timestamp())
    return asdict(Limits(until_epoch, None if math.isinf(until_time) else until_time))
