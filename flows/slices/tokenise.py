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
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.futures import as_completed

from cache.config import RowsConfig
from cache.key.content import ContentKey
from cache.slices.plan import Plan, Slice, Tokeniser, num_rows_of, plan_slices
from cache.source.find import find_parts
from cache.source.open import open_source
from flows.errors import BadParameter
from flows.runs.directory import Tree
from flows.runs.repeats import is_worth_retrying, slice_key
from flows.show.artifacts import reporting
from flows.show.progress import StageProgress, progress_line

LOCAL = "local:"  # so many worker processes here

WORKERS_OWN = 0  # threads: as many as the Dask worker was given

SoFar = Callable[[int], None]  # told how many rows of the slice at hand are tokens, again from 0 when it is tried again
_Makes = Callable[[list[Tree]], Iterator[tuple[Slice, Tree]]]  # parameters of tasks → what they came to, in any order

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
            _make_all(partial(_here, recorded, watch), plan, missing, watch)
            _kept.clear()  # a tokenizer is of no use to the stages that follow
        else:
            with _runner(dask) as (runner, threads):
                _make_all(partial(_on_dask, recorded, runner, threads), plan, missing, watch)


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
    plan: Plan,
    number: int,
    of: int,
    wait: bool = True,
    threads: int | None = None,
    so_far: SoFar | None = None,
) -> Tree:
    """Nothing but a call: a task travels to a worker with all that its function names, so it names one function."""
    return make_slice(one, plan, wait=wait, threads=threads, so_far=so_far)


def make_slice(one: Slice, plan: Plan, *, wait: bool, threads: int | None, so_far: SoFar | None) -> Tree:
    """What it came to; `made` is False where another builder is at the slice and this one does not wait."""
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
    """Rows of all missing slices, whoever makes them, and how fast they come to be there."""

    def __init__(self, missing: list[Slice], of: int, show: Callable[[StageProgress], None]) -> None:
        self._show, self._started = show, time.monotonic()
        self._rows = self._at_hand = 0  # of slices that are there, and of the one being made in this process
        self._total = num_rows_of(missing)
        self._slices, self._missing, self._of = 0, len(missing), of

    def so_far(self, rows: int) -> None:
        self._at_hand = rows
        self._tell()

    def done(self, one: Slice) -> None:
        """The slice is there, also where another builder made it."""
        self._rows += self._at_hand if one.cut.num_rows is None else one.cut.num_rows
        self._at_hand = 0
        self._slices += 1
        self._tell()

    def _tell(self) -> None:
        rows = self._rows + self._at_hand
        seconds = time.monotonic() - self._started
        rate = rows / seconds if seconds > 0 else 0.0
        left = max(0, self._total - rows) / rate if self._total is not None and rate else None
        self._show(
            StageProgress(
                stage="tokenise",
                done=rows,
                total=self._total,
                unit="rows",
                rate=rate,
                seconds=seconds,
                eta_s=left,
                message=f"{self._slices} of {self._missing} slices made, {self._of - self._missing} were there",
            )
        )


def _make_all(make: _Makes, plan: Plan, missing: list[Slice], watch: _Watch) -> None:
    """Those that other builders are at come last, when they are likely to be there: nothing waits before."""
    numbers = {one.key: number for number, one in enumerate(plan.slices, start=1)}
    common = {"plan": replace(plan, slices=()), "of": len(plan.slices)}
    left = missing
    for wait in (False, True):
        asked = [common | {"one": one, "number": numbers[one.key], "wait": wait} for one in left]
        left = []
        for one, made in make(asked):
            if made["made"]:
                watch.done(one)
            else:
                left.append(one)


def _here(recorded: Any, watch: _Watch, asked: list[Tree]) -> Iterator[tuple[Slice, Tree]]:
    for parameters in asked:
        yield parameters["one"], recorded(**parameters, so_far=watch.so_far)


def _on_dask(recorded: Any, runner: Any, threads: int, asked: list[Tree]) -> Iterator[tuple[Slice, Tree]]:
    futures = {runner.submit(recorded, parameters=one | {"threads": threads}): one["one"] for one in asked}
    for future in as_completed(list(futures)):
        yield futures[future], future.result()  # raises what the task failed with


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
