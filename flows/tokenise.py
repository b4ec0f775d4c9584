"""Conversations → slices: one task for each slice that is missing, in this process or on Dask workers.

In this process they are made one after the other, because the tokenizer's own threads use all cores already. On Dask
each worker reads the source and writes slices in storage that all share; nothing but their names travels. How many
threads a worker's tokenizer starts is decided there, so that workers of one machine do not fight over its cores.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.futures import as_completed

from cache.config import RowsConfig
from cache.files import find_parts
from cache.key import ContentKey
from cache.slices import Plan, Slice, Tokeniser, num_rows_of, plan_slices
from cache.source import open_source
from cache.tokenise import Told
from flows.artifacts import reporting
from flows.errors import BadParameter
from flows.keys import is_hopeless, slice_key
from flows.progress import StageProgress, progress_line
from flows.run import Tree

LOCAL = "local:"  # so many worker processes here

WORKERS_OWN = 0  # threads: as many as the Dask worker was given

_kept: dict[tuple[str, Path], Tokeniser] = {}
_one_at_a_time = threading.Lock()  # a worker may have several threads, but the tokenizer is one and uses them all


def tokenise_missing(rows: RowsConfig, tokenizer: Path, key: ContentKey, home: Path, dask: str | None) -> None:
    """Make the slices that the token cache of this key lacks. Rows that came tokenised have none."""
    source = open_source(find_parts(rows), rows)
    if source.layout.kind == "tokens":
        return
    plan = plan_slices(source, rows, tokenizer, key.parts, home)
    missing = plan.missing()
    if not missing:
        return
    recorded = tokenise_slice.with_options(result_storage=home / "tokens" / ".records")
    with reporting(key.hex[:8], "tokenise") as reporter, progress_line("tokenise") as line:

        def show(state: StageProgress) -> None:
            line.show(state)
            reporter.show(state)

        watch = _Watch(missing, len(plan.slices), show)
        if dask is None:
            _here(recorded, plan, missing, watch)
        else:
            _on_dask(recorded, plan, missing, watch, dask)


def may_do_better(task: Any, task_run: Any, state: "State[Any]") -> bool:
    """A bad row fails at once; a lost disk or worker may be back next time."""
    failure = state.result(raise_on_failure=False)
    return not (isinstance(failure, BaseException) and is_hopeless(failure))


@task(
    name="tokenise",
    task_run_name="tokenise slice {number}/{of}",
    cache_key_fn=slice_key,
    refresh_cache=True,  # it was asked for because it is not there, whatever a record says
    persist_result=True,
    result_serializer="json",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=may_do_better,
)
def tokenise_slice(
    one: Slice,
    plan: Plan,
    number: int,
    of: int,
    wait: bool = True,
    threads: int | None = None,
    told: Told | None = None,
) -> Tree:
    """Nothing but a call: a task travels to a worker with all that its function names, so it names one function."""
    return make_slice(one, plan, wait=wait, threads=threads, told=told)


def make_slice(one: Slice, plan: Plan, *, wait: bool, threads: int | None, told: Told | None) -> Tree:
    """What it came to; `made` is False where another builder is at the slice and this one does not wait."""
    if threads is not None:
        _limit_threads(threads)
    started = time.monotonic()
    with _one_at_a_time:
        made = _tokeniser(plan).make(one, wait=wait, told=told)
    return {
        "slice": one.key,
        "rows": one.cut.num_rows,
        "made": made,
        "by": f"{socket.gethostname()}:{os.getpid()}",
        "seconds": round(time.monotonic() - started, 3),
    }


def _limit_threads(threads: int) -> None:
    """Of this process's tokenizer, which reads this once, when it first works."""
    if threads == WORKERS_OWN:
        from distributed import get_worker

        threads = get_worker().state.nthreads
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


def check_dask(dask: str | None) -> None:
    """Raises, before any work, where the extra is missing."""
    if dask is not None:
        _runner_class()


class _Watch:
    """Rows of all missing slices, and how fast they go."""

    def __init__(self, missing: list[Slice], of: int, show: Callable[[StageProgress], None]) -> None:
        self._show, self._started = show, time.monotonic()
        self._rows, self._total = 0, num_rows_of(missing)
        self._slices, self._missing, self._of = 0, len(missing), of

    def told(self, rows: int) -> None:
        self._rows += rows
        seconds = time.monotonic() - self._started
        rate = self._rows / seconds if seconds > 0 else 0.0
        left = max(0, self._total - self._rows) / rate if self._total is not None and rate else None
        self._show(
            StageProgress(
                stage="tokenise",
                done=self._rows,
                total=self._total,
                unit="rows",
                rate=rate,
                seconds=seconds,
                eta_s=left,
                message=f"{self._slices} of {self._missing} slices made, {self._of - self._missing} were there",
            )
        )

    def done(self) -> None:
        self._slices += 1


def _here(recorded: Any, plan: Plan, missing: list[Slice], watch: _Watch) -> None:
    numbers = {one.key: number for number, one in enumerate(plan.slices, start=1)}
    recipe, left = replace(plan, slices=()), missing
    for wait in (False, True):  # those that another builder is at come last, when they are likely to be there
        later = []
        for one in left:
            made = recorded(one, recipe, numbers[one.key], len(plan.slices), wait=wait, told=watch.told)["made"]
            if made:
                watch.done()
            else:
                later.append(one)
        left = later
    _kept.clear()  # a tokenizer is of no use to the stages that follow


def _on_dask(recorded: Any, plan: Plan, missing: list[Slice], watch: _Watch, dask: str) -> None:
    numbers = {one.key: number for number, one in enumerate(plan.slices, start=1)}
    recipe = replace(plan, slices=())
    with _runner(dask) as (runner, threads):
        futures = {}
        for one in missing:
            given = {"one": one, "plan": recipe, "number": numbers[one.key], "of": len(plan.slices)}
            futures[runner.submit(recorded, parameters=given | {"threads": threads})] = one
        for future in as_completed(list(futures)):
            future.result()  # raises what the task failed with
            watch.done()
            watch.told(futures[future].cut.num_rows or 0)


@contextlib.contextmanager
def _runner(dask: str) -> Iterator[tuple[Any, int]]:
    """A running task runner, and how many threads each worker's tokenizer starts."""
    make = _runner_class()
    if not dask.startswith(LOCAL):
        with make(address=dask) as runner:
            yield runner, WORKERS_OWN
        return
    workers = int(dask.removeprefix(LOCAL))
    quiet = {"PREFECT_LOGGING_LEVEL": "WARNING"}  # a line a slice belongs on the pages, not on the terminal
    cluster = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "memory_limit": 0,
        "dashboard_address": None,
        "env": quiet,
    }
    with make(cluster_kwargs=cluster) as runner:
        yield runner, max(1, len(os.sched_getaffinity(0)) // workers)


def _runner_class() -> Any:
    try:
        from prefect_dask import DaskTaskRunner  # an extra
    except ImportError:
        raise BadParameter(
            'dask: prefect-dask is not installed. pip install "dflash-train[dask]", or set dask=null to tokenise in '
            "this process, whose tokenizer uses all cores."
        ) from None
    return DaskTaskRunner


def _tokeniser(plan: Plan) -> Tokeniser:
    """This process's tokeniser, kept from slice to slice of one plan."""
    place = (plan.recipe, plan.directory)
    if place not in _kept:
        _kept.clear()
        _kept[place] = Tokeniser(plan)
    return _kept[place]
