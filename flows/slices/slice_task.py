"""What travels: the task that makes one slice of conversations into tokens, here or on a Dask worker."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prefect import task

from cache.slices.make import Tokeniser
from cache.slices.plan import Slice, SlicePlan
from flows.runs.directory import Tree
from flows.runs.repeats import is_worth_retrying, slice_key

WORKERS_OWN = 0  # threads: as many as the Dask worker was given

SoFar = Callable[[int], None]  # told how many rows of the slice at hand are tokens, again from 0 when it is tried again

_kept: dict[tuple[str, Path], Tokeniser] = {}
_one_at_a_time = threading.Lock()  # a worker may have several threads, but the tokenizer is one and uses them all


@task(
    name="tokenise",
    task_run_name="tokenise slice {number}/{of}",
    cache_key_fn=slice_key,
    refresh_cache=True,  # it was asked for because it is not there, whatever a record says
    persist_result=True,
    result_serializer="json",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=is_worth_retrying,
)
def tokenise_slice(
    one: Slice,
    plan: SlicePlan,
    number: int,
    of: int,
    wait: bool = True,
    threads: int | None = None,
    so_far: SoFar | None = None,
) -> Tree:
    """Only a call: the task is sent to workers with everything its function names, so it names one function."""
    return make_slice(one, plan, wait=wait, threads=threads, so_far=so_far)


def make_slice(one: Slice, plan: SlicePlan, *, wait: bool, threads: int | None, so_far: SoFar | None) -> Tree:
    """Make the slice and say what was done; `made` is False where another builder holds it and `wait` is not set."""
    if threads is not None:
        _limit_threads(threads)
    rows = 0

    def told(more: int) -> None:
        nonlocal rows
        rows += more
        if so_far is not None:
            so_far(rows)

    with _one_at_a_time:
        started = time.monotonic()
        made = _tokeniser(plan).make(one, wait=wait, told=told)
        seconds = time.monotonic() - started
    return {
        "slice": one.key,
        "rows": one.cut.num_rows,
        "made": made,
        "by": f"{socket.gethostname()}:{os.getpid()}",
        "seconds": round(seconds, 3),
    }


def forget_tokenizer() -> None:
    """Free this process's tokenizer: it is of no use to the stages that follow."""
    _kept.clear()


def _limit_threads(threads: int) -> None:
    """Set how many threads this process's tokenizer uses; it reads that once, when it is first used."""
    if threads == WORKERS_OWN:
        from distributed import get_worker

        threads = get_worker().state.nthreads
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def _tokeniser(plan: SlicePlan) -> Tokeniser:
    """This process's tokeniser, kept from slice to slice of one plan."""
    place = (plan.recipe, plan.directory)
    if place not in _kept:
        _kept.clear()
        _kept[place] = Tokeniser(plan)
    return _kept[place]
