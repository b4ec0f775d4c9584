"""A training run: from the newest checkpoint to the end of the plan, or as far as this run should go."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from dflash.batch import StepReport
from dflash.distributed import Ranks, joined
from dflash.errors import CheckpointCorrupt, StageFailed
from dflash.files import checksum
from dflash.interrupt import Interrupted, stop_signals
from dflash.model.flex import num_compiles
from dflash.pipeline.pipeline import Pipeline
from dflash.pipeline.telemetry import bottleneck
from dflash.run_directory import CONFIG, ProgressFile
from dflash.step_sums import PendingReport
from dflash.training import checkpoint
from dflash.training.checkpoint import Checkpoint, Writer
from dflash.training.curves import Curves, of_line
from dflash.training.kept_features import fill_features
from dflash.training.metrics import Window, write_line
from dflash.training.monitor import Monitor
from dflash.training.open_run import OpenRun, changed_settings, open_run, refuse_changed
from dflash.training.parts import make_parts
from dflash.training.provenance import gpu_memory, provenance
from dflash.training.replicas import compare_replicas
from dflash.training.time_left import TimeLeft
from dflash.training.trackers import start_trackers
from dflash.training.train_result import result
from dflash.training.until import NO_LIMIT, Until

log = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 10  # in a row, after which the run ends


def train(
    path: Path,
    tokens: Path,
    until: Until = NO_LIMIT,
    *,
    override: bool = False,
    last_resort: Callable[[BaseException], None] = lambda error: None,
    config_name: str = CONFIG,
) -> None:
    """Train the run at `path` on a token cache and write train.json.

    It ends before `until`, training.epochs_per_run and training.stop_after_s, with a checkpoint. `override` accepts
    settings that change the curve, and records them. Raises Interrupted after SIGTERM or SIGINT, RunLocked,
    ConfigMismatch when a setting that changes the curve differs from the run's own, CheckpointCorrupt, StageFailed.
    """
    with stop_signals() as stopping, joined() as ranks, checkpoint.run_lock(path) if ranks.leads else nullcontext():
        opened = open_run(path, tokens, config_name)
        ranks.wait()  # nobody looks for checkpoints before the leader holds the lock
        start = agreed(opened.run.checkpoints, ranks)
        if start is not None:
            start = _accept(opened, start, override, ranks)
        if ranks.leads:
            opened.run.accept_config()
        if start is not None and start.state.epoch >= opened.config.training.epochs:
            log.info("all %d epochs are trained: nothing left", start.state.epoch)
            if ranks.leads and not (path / "train.json").exists():  # killed before it was written
                opened.run.write("train.json", result(opened, start, None))
            return
        until = until.within(opened.config.training, start.state.epoch if start else 0)
        _Run(opened, start, until, ranks, stopping, last_resort).run()


def agreed(directory: Path, ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to go on from: the leader's newest one, on all processes; None when there is none.

    Raises CheckpointCorrupt where a process does not find that one, or finds another content: from unequal replicas,
    summed gradients would train a meaningless average.
    """
    start = checkpoint.newest(directory) if ranks.leads else None
    name = ranks.gather(start.path.name if start else None)[0]
    if name is None:
        return None
    start = start or checkpoint.verify(directory / name)
    found = ranks.gather(checksum(start.path / "state.json"))
    if len(set(found)) > 1:
        raise CheckpointCorrupt(
            f"the processes of this run read unequal checkpoints {name} in {directory}: xxh3 of state.json by process "
            f"{found}, expected one. The run directory must be on a file system that all of them see; remove the copy."
        )
    return start


def _accept(opened: OpenRun, start: Checkpoint, override: bool, ranks: Ranks) -> Checkpoint:
    """The checkpoint under the settings of now; those that were changed are refused, or recorded."""
    settings = opened.settings()
    changed = changed_settings(start.state.settings, settings)
    refuse_changed(changed, override=override)
    if changed and ranks.leads:
        opened.run.record("override", checkpoint=start.path.name, changed=changed)
        log.warning("settings that change the curve are overridden: %s", changed)
    return replace(start, state=replace(start.state, settings=settings))


class _Run:
    """One process's part of a run: what its steps add to, and what its checkpoints are made from."""

    def __init__(
        self,
        opened: OpenRun,
        resumed: Checkpoint | None,
        until: Until,
        ranks: Ranks,
        stopping: threading.Event,
        last_resort: Callable[[BaseException], None],
    ) -> None:
        self.opened, self.resumed, self.until, self.ranks, self.stopping = opened, resumed, until, ranks, stopping
        self.training = opened.config.training
        parts = make_parts(opened, resumed, ranks, self._stop_asked)
        self.plan, self.state, self.trainer, self.features = parts.plan, parts.start, parts.trainer, parts.features
        self.target = parts.targets[0]
        self.window = Window(**parts.start.window)
        flush = parts.features.flush if parts.features is not None else lambda: None
        self.writer = Writer(opened.run.checkpoints, self.training.keep, flush)
        self.pipeline = Pipeline(
            parts.plan,
            parts.trainer,
            parts.targets,
            parts.features,
            ranks=ranks,
            threads=parts.threads,
            ahead=parts.ahead,
            last_resort=last_resort,
        )
        watched = self.training.evaluate_every_steps is not None
        self.monitor = Monitor(opened, self.target, parts.ends, ranks) if watched else None
        self.pending: deque[PendingReport] = deque()
        self.stop = False
        self.stop_step: int | None = None  # the first step whose processes were asked to stop

    def run(self) -> None:
        """Train to the end of this run's part and write train.json."""
        start, run, epochs = self.state, self.opened.run, self.training.epochs
        self.end = min(epochs, epochs if self.until.epoch is None else self.until.epoch)
        if self.ranks.leads:
            run.rewind_metrics(start.epoch, start.step)
            self.curves = Curves(run.path / "tensorboard", start.steps_total)
            where = {"epoch": start.epoch, "step": start.step, "threads": start.threads, "processes": self.ranks.size}
            run.record("start", **where, **provenance())
            self.trackers = start_trackers(run.path, list(self.training.trackers))
        if self.features is not None:
            fill_features(self.features, self.plan, self.target, start, run, self.ranks)
        self.total = sum(self.plan.steps(epoch) for epoch in range(epochs))
        at = f"epoch {start.epoch} step {start.step}, {start.steps_total} of {self.total} steps done"
        log.info("training from %s", at)
        self.progress = ProgressFile(run, "train", self.total, "steps", start.steps_total) if self.ranks.leads else None
        self.left = TimeLeft(self.total, self.plan.steps(0), start.steps_total, reuse=self.features is not None)
        self._compare()  # and wait: a step's sums do not wait for one that is still loading
        self.lined = self.stepped = self.saved = time.monotonic()
        try:
            self.pipeline.run(start.epoch, start.step, self.end, self._on_step)
            self._settle(0)
            self._refuse_nothing()
            self._save()
        finally:
            done = self.writer.finish()
        if self.ranks.leads:
            assert done is not None
            stages = self.pipeline.stages()
            run.write("train.json", result(self.opened, done, self.resumed, stages, self.pipeline.shares_device))
            run.record("end", epoch=self.state.epoch, step=self.state.step, stopped=self.stop)
        # All end alike: torchrun takes processes that do not for a failure.
        if any(self.ranks.gather(self.stopping.is_set())) and self.state.epoch < epochs:
            raise Interrupted

    def _on_step(self, pending: PendingReport) -> bool:
        """Keep count, write what is due, say whether to go on.

        Reports are read a step late where nothing is due, so that the device never waits.
        """
        self.writer.check()
        self.pending.append(pending)
        done = self.state.steps_total + len(self.pending)
        training = self.training
        at = pending.at
        ends = (at.epoch + 1, at.step + 1) == (self.end, at.steps_in_epoch)
        every = training.evaluate_every_steps
        evaluated = every is not None and (ends or done % every == 0)  # before the position's one checkpoint
        due = evaluated or done % training.checkpoint_every_steps == 0
        overdue = time.monotonic() - self.saved >= training.checkpoint_every_s and not self.writer.busy
        self._settle(0 if due or overdue or done % training.log_every_steps == 0 else 1)
        if evaluated:
            self._evaluate()
        if due:
            self._compare()
        if due or overdue:
            self._save()
        if due:  # the leader may have waited for a slow disk: longer than a step's sums would wait for it
            self.ranks.wait()
        # Several processes must end at one step: all look at the sum of the step before, though some have read more.
        # One alone need not wait for it.
        agreed = self.stop_step is not None and self.stop_step < done
        self.stop = agreed or (self.ranks.size == 1 and self._stop_asked())
        return not self.stop

    def _compare(self) -> None:
        compare_replicas(self.ranks, self.trainer.parameters.values(), self.state.steps_total)

    def _evaluate(self) -> None:
        """Measure τ; the checkpoint that is written next may be the best one."""
        assert self.monitor is not None
        tau = self.monitor.tau(self.trainer.drafter)
        log.info("τ %.3f ± %.3f on held-out rows after %d steps", tau.value, tau.standard_error, self.state.steps_total)
        name = checkpoint.name_of(self.state)
        if self.ranks.leads:
            self.opened.run.record(
                "tau", checkpoint=name, steps=self.state.steps_total, value=tau.value, se=tau.standard_error
            )
            self.curves.add(self.state.steps_total, {"tau": tau.value})
        if math.isfinite(tau.value) and (self.state.best is None or tau.value >= self.state.best["tau"]):
            self.state = replace(self.state, best={"tau": tau.value, "checkpoint": name})

    def _stop_asked(self) -> bool:
        return self._late() or self.stopping.is_set()

    def _late(self) -> bool:
        return self.until.time is not None and time.time() >= self.until.time

    def _settle(self, newest: int) -> None:
        """Read all pending reports but the newest few."""
        while len(self.pending) > newest:
            self._count(self.pending.popleft().report())

    def _count(self, report: StepReport) -> None:
        now, done = time.monotonic(), self.state.steps_total + 1
        self.window.add(report)
        if report.stop and self.stop_step is None:
            self.stop_step = done
        if done % self.training.log_every_steps == 0:
            self._log(report, now)
        ended = report.step + 1 == report.steps_in_epoch
        self.state = replace(
            self.state,
            epoch=report.epoch + 1 if ended else report.epoch,
            step=0 if ended else report.step + 1,
            steps_total=done,
            bad_steps=self.state.bad_steps + 1 if report.skipped else 0,
            weight=self.state.weight + (0.0 if report.skipped else report.weight_sum),
            tokens=self.state.tokens + report.tokens,
            seconds=self.state.seconds + now - self.stepped,
            window=self.window.to_json(),
        )
        self.stepped = now
        if self.progress is not None:
            shares = self.pipeline.stages().items()
            busy = ", ".join(f"{name} {share['busy']:.0%}" for name, share in shares)
            left_s = self.left.after(done, self.pipeline.busy_s("train"))
            self.progress.update(done, f"loss {report.loss:.3f}, busy: {busy}", left_s)
        if report.skipped:
            log.warning("epoch %d step %d is skipped: %s", report.epoch, report.step, _facts(report))
        if self.state.bad_steps >= MAX_SKIPPED_STEPS:
            raise StageFailed(
                f"{MAX_SKIPPED_STEPS} steps in a row were skipped, the last of them epoch {report.epoch} step "
                f"{report.step}: {_facts(report)}. Lower training.lr, or look at the rows of these steps."
            )

    def _log(self, report: StepReport, now: float) -> None:
        """Write the window's line and begin the next one."""
        stages, window, seconds = self.pipeline.stages(), self.window, now - self.lined
        sentence = bottleneck(stages, shared=self.pipeline.shares_device, reuse=self.features is not None)
        if self.ranks.leads:
            facts = {"stages": stages, "queues": self.pipeline.queues(), "bottleneck": sentence}
            facts |= {"gpu_memory_bytes": gpu_memory(), "compiles": num_compiles()}
            line = write_line(self.opened.run, window, report, seconds, facts)
            self.curves.add(self.state.steps_total + 1, of_line(line))
            speed = window.tokens / seconds if seconds else 0.0
            said = f"loss {report.loss:.4f}, lr {report.lr:.2e}, coverage {window.coverage or 0:.0%}"
            log.info("epoch %d step %d: %s, %.0f tokens/s; %s", report.epoch, report.step, said, speed, sentence)
        self.window, self.lined = Window(), now

    def _refuse_nothing(self) -> None:
        if self.state.steps_total and not self.state.weight:
            raise StageFailed(
                f"none of {self.state.steps_total} steps had a supervised token to learn from: Σw is 0 in all of them. "
                "The rows' loss mask is empty; prepare them again."
            )

    def _save(self) -> None:
        """Begin to write a checkpoint of the current position; the features that later epochs need come first."""
        self.saved = time.monotonic()
        if self.ranks.leads:
            self.writer.save(self.state, self.trainer.drafter.state_dict(), self.trainer.optimizer_tensors())


def _facts(report: StepReport) -> str:
    counted = int(sum(report.counted_by_slot))
    return f"{counted} supervised slots, Σ w·CE = {report.loss_sum}, gradient norm = {report.grad_norm}"
