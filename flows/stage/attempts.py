"""A stage is tried again for as long as something comes of it: only failures without progress count.

Over days a machine fails now and then; with a new checkpoint between two failures, the count begins anew. It lies in
the run directory under the flow run's id: a flow run that died as a whole and was started again goes on counting,
another flow run begins anew.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from prefect.runtime import flow_run

from cache.json_file import read_json, write_json
from flows.errors import NoProgress
from flows.runs.directory import Tree
from flows.runs.repeats import is_hopeless

logger = logging.getLogger("flows.stage.attempts")

MAX_FAILURES = 3  # without progress between them
DELAYS_S = (10.0, 30.0)  # after the first, after the second

Position = tuple[int, ...]


def keep_trying(stage: str, run: Path, position: Callable[[], Position], attempt: Callable[[], Tree]) -> Tree:
    """What the attempt returns. Raises what it failed with where trying again is hopeless, or nothing has come of it.

    Each attempt is a task run of its own, whose process is a new one: nothing that a failed one held is kept.
    """
    owner = flow_run.id or uuid4().hex  # a plain call is no flow run, and nobody starts it again
    file = run / f"attempts-{stage}.json"
    while True:
        before = _begin(stage, file, owner, position())
        try:
            result = attempt()
        except Exception as error:
            if is_hopeless(error) or (position() <= before.position and before.number >= MAX_FAILURES):
                file.unlink(missing_ok=True)  # tried again by hand, it has all its attempts
                raise
            _wait(stage, error, 0 if position() > before.position else before.number)
        except BaseException:  # told to stop, which is no failure
            file.unlink(missing_ok=True)
            raise
        else:
            file.unlink(missing_ok=True)
            return result


@dataclass(frozen=True, slots=True)
class _Attempt:
    position: Position  # where it began
    number: int  # how many began there, this one included


def _begin(stage: str, file: Path, owner: str, position: Position) -> _Attempt:
    """Counts the attempt before it is made: a death of this process, too, leaves it counted."""
    last = read_json(file) or {}
    is_stuck = last.get("flow_run") == owner and position <= tuple(last["position"])
    number = last["number"] + 1 if is_stuck else 1
    if number > MAX_FAILURES:
        file.unlink(missing_ok=True)
        raise NoProgress(
            f"{stage} of {file.parent} has died {MAX_FAILURES} times in this flow run without getting further. "
            f"{file.parent / 'logs'} and the log of the worker say why; start it again once that is mended."
        )
    write_json(file, {"flow_run": owner, "position": position, "number": number})
    return _Attempt(position, number)


def _wait(stage: str, error: Exception, failures: int) -> None:
    delay = DELAYS_S[max(0, failures - 1)]
    logger.warning("%s failed: %s: %s", stage, type(error).__name__, error)
    logger.warning(
        "It is tried again in %.0f s, from where it got to; after %d failures without progress it is not (now %d).",
        delay,
        MAX_FAILURES,
        failures,
    )
    time.sleep(delay)
