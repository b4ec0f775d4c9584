"""Conversations → slices: one task for each slice that is missing, in this process or on Dask workers.

In this process they are made one after the other, because the tokenizer's own threads use all cores already. On Dask
each worker reads the source and writes slices in storage that all share; nothing but their names travels. How many
threads a worker's tokenizer starts is decided there, so that workers of one machine do not fight for its cores.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from prefect.futures import as_completed

from cache.config import RowsConfig
from cache.key.content import ContentKey
from cache.slices.plan import Slice, SlicePlan, num_rows_of, plan_slices
from cache.source.find import find_files
from cache.source.open import open_source
from flows.errors import BadParameter
from flows.runs.directory import Tree
from flows.show.artifacts import reporting
from flows.show.progress import StageProgress, progress_line
from flows.slices.slice_task import WORKERS_OWN, SoFar, forget_tokenizer, make_slice, tokenise_slice

MOST_TASKS = 2_000  # of Prefect: where there are more slices, as of many small files, the others are plain calls
LOCAL = "local:"  # so many worker processes here


def tokenise_missing(
    rows: RowsConfig,
    tokenizer: Path,
    key: ContentKey,
    home: Path,
    dask: str | None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Make the slices that the token cache of this key lacks. Rows that came tokenised have none."""
    source = open_source(find_files(rows), rows)
    if source.layout.kind == "tokens":
        return
    plan = plan_slices(source, rows, tokenizer, key.parts, home, trust_remote_code=trust_remote_code)
    missing = plan.missing()
    if not missing:
        return
    recorded = tokenise_slice.with_options(result_storage=home / "tokens" / ".records")
    with reporting(key.hex[:8], "tokenise") as reporter, progress_line("tokenise") as line:

        def show(state: StageProgress) -> None:
            line.show(state)
            reporter.show(state)

        progress = _TokeniseProgress(missing, len(plan.slices), show)
        with _here(recorded, progress.so_far) if dask is None else _on_dask(recorded, dask) as executor:
            _make_all(executor, plan, missing, progress)


def check_dask(dask: str | None) -> None:
    """Raises, before any work, where the extra is missing."""
    if dask is not None:
        _runner_class()


class _Executor(Protocol):
    """Runs the task on slices: the parameters of each go in, what it came to comes out, in any order."""

    def map(self, asked: Iterable[Tree]) -> Iterator[tuple[Slice, Tree]]: ...


@dataclass(frozen=True, slots=True)
class _Here:
    """One after the other, in this process."""

    recorded: Any
    so_far: SoFar

    def map(self, asked: Iterable[Tree]) -> Iterator[tuple[Slice, Tree]]:
        for number, parameters in enumerate(asked):
            one, is_task = parameters["one"], number < MOST_TASKS
            made = (
                self.recorded(**parameters, so_far=self.so_far)
                if is_task
                else make_slice(one, parameters["plan"], wait=parameters["wait"], threads=None, so_far=self.so_far)
            )
            yield one, made


@dataclass(frozen=True, slots=True)
class _OnDask:
    """On the workers of a running task runner."""

    recorded: Any
    runner: Any
    threads: int  # of each worker's tokenizer

    def map(self, asked: Iterable[Tree]) -> Iterator[tuple[Slice, Tree]]:
        futures = {
            self.runner.submit(self.recorded, parameters=one | {"threads": self.threads}): one["one"] for one in asked
        }
        for future in as_completed(list(futures)):
            yield futures[future], future.result()  # raises what the task failed with


@contextlib.contextmanager
def _here(recorded: Any, so_far: SoFar) -> Iterator[_Executor]:
    yield _Here(recorded, so_far)
    forget_tokenizer()


def _on_dask(recorded: Any, dask: str) -> AbstractContextManager[_Executor]:
    return (
        _local_workers(recorded, int(dask.removeprefix(LOCAL))) if dask.startswith(LOCAL) else _cluster(recorded, dask)
    )


@contextlib.contextmanager
def _cluster(recorded: Any, address: str) -> Iterator[_Executor]:
    with _runner_class()(address=address) as runner:
        yield _OnDask(recorded, runner, WORKERS_OWN)


@contextlib.contextmanager
def _local_workers(recorded: Any, workers: int) -> Iterator[_Executor]:
    cluster = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "memory_limit": 0,
        "dashboard_address": None,
        "env": {"PREFECT_LOGGING_LEVEL": "WARNING"},  # a line a slice belongs on the pages, not on the terminal
    }
    with _runner_class()(cluster_kwargs=cluster) as runner:
        yield _OnDask(recorded, runner, max(1, len(os.sched_getaffinity(0)) // workers))


def _runner_class() -> Any:
    try:
        from prefect_dask import DaskTaskRunner  # an extra
    except ImportError:
        raise BadParameter(
            'dask: prefect-dask is not installed. pip install "dflash-train[dask]", or set dask=null to tokenise in '
            "this process, whose tokenizer uses all cores."
        ) from None
    return DaskTaskRunner


class _TokeniseProgress:
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


def _make_all(executor: _Executor, plan: SlicePlan, missing: list[Slice], progress: _TokeniseProgress) -> None:
    """Make all slices. Those that another builder holds come last, so that nothing waits for them before."""
    numbers = {one.key: number for number, one in enumerate(plan.slices, start=1)}
    common = {"plan": replace(plan, slices=()), "of": len(plan.slices)}
    left = missing
    for wait in (False, True):
        asked = [common | {"one": one, "number": numbers[one.key], "wait": wait} for one in left]
        left = []
        for one, made in executor.map(asked):
            if made["made"]:
                progress.done(one)
            else:
                left.append(one)
