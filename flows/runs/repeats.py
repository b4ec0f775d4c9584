"""Decides what repeats a stage, and is the only place that hands content keys to Prefect.

Prefect's record of a token cache is an index: the record's key is the content key, its value the name of the directory,
and the directory is the truth (`why_not_open`). What the other stages made lives in the run directory, beside the
fingerprint of what it was made from.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.disk.store import TokenCache
from cache.errors import CacheError
from cache.plain_errors import HOPELESS_ERRNOS
from dflash.config import NOT_LEARNED
from dflash.errors import CheckpointCorrupt, ConfigMismatch, RunLocked, TargetMismatch
from dflash.target.identity import fingerprint
from flows.errors import BadParameter, CannotFit, NoProgress, StageRefused, StageStopped
from flows.runs.directory import Tree, newest_checkpoint
from flows.runs.parameters import Parameters

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State
    from prefect.context import TaskRunContext

logger = logging.getLogger("flows.runs.repeats")

# Trying again would fail again: the parameters, the rows or the files have to change first.
HOPELESS: tuple[type[Exception], ...] = (
    BadParameter,
    CacheError,
    CannotFit,
    NoProgress,
    CheckpointCorrupt,
    ConfigMismatch,
    RunLocked,
    StageRefused,
    StageStopped,
    TargetMismatch,
)


def tokens_key(context: "TaskRunContext", arguments: Tree) -> str:
    """The key of the record of a token cache: the content key, and nothing of Prefect's own."""
    key: str = arguments["key"]
    return key


def slice_key(context: "TaskRunContext", arguments: Tree) -> str:
    """The key of the record of a slice of conversations, which is its file's name."""
    key: str = arguments["one"].key
    return key


def why_not_open(directory: Path) -> str | None:
    """None when a token cache is there and opens, else why not: then a record that names it counts for nothing."""
    try:
        TokenCache.open(directory)
    except (CacheError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def is_hopeless(failure: object) -> bool:
    """A wrong parameter or a bad row fails at once; a killed process, a lost GPU or disk may do better next time."""
    return isinstance(failure, HOPELESS) or getattr(failure, "errno", None) in HOPELESS_ERRNOS


def is_worth_retrying(task: Any, task_run: Any, state: "State[Any]") -> bool:
    """For tasks that Prefect itself tries again."""
    failure = state.result(raise_on_failure=False)
    is_worth_it = not is_hopeless(failure)
    if is_worth_it:
        logger.warning("%s failed: %s: %s", task.name, type(failure).__name__, failure)
        logger.warning("It is tried again, up to %d times, from where it got to.", task.retries)
    return is_worth_it


def train_fingerprint(parameters: Parameters, tokens: Path) -> str:
    tree = parameters.model_dump(mode="json")
    training = {name: value for name, value in tree["training"].items() if name not in NOT_LEARNED}
    return _digest([tokens.name, _target(parameters), tree["drafter"], training])


def evaluate_fingerprint(parameters: Parameters, tokens: Path) -> str:
    evaluation = parameters.evaluation.model_dump(mode="json")
    return _digest([_checkpoint(parameters.run_directory), tokens.name, _target(parameters), evaluation])


def export_fingerprint(parameters: Parameters) -> str:
    export = parameters.export.model_dump(mode="json")
    return _digest([_checkpoint(parameters.run_directory), _target(parameters), export])


def _target(parameters: Parameters) -> list[str]:
    """The target by its content: places may change, and another one may lie at the same place."""
    return [fingerprint(parameters.target), parameters.target.dtype]


def serve_fingerprint(parameters: Parameters, tokens: Path) -> str:
    return _digest([evaluate_fingerprint(parameters, tokens), export_fingerprint(parameters)])


def _checkpoint(run: Path) -> list[str]:
    """Name and content of the newest checkpoint: its state holds the checksums of its other files."""
    newest = newest_checkpoint(run)
    return [] if newest is None else [newest.name, (newest / "state.json").read_text()]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
