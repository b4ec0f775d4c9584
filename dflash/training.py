"""A training run: from the newest checkpoint to the end of the plan, or as far as this run should go."""

import logging
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cache.gather import Buffers
from dflash import checkpoint
from dflash.batch import StepReport
from dflash.checkpoint import Checkpoint, State
from dflash.drafter import Drafter, DrafterShape
from dflash.features import FeatureStore
from dflash.init import new_drafter
from dflash.metrics import Window, recent_loss, write_line
from dflash.opening import Devices, OpenRun, cpu_threads, open_run, place, refuse_changed
from dflash.pipeline.run import Pipeline, Plan
from dflash.pipeline.stages import batch_features, make_batch
from dflash.pipeline.telemetry import bottleneck
from dflash.run import Progress
from dflash.target import Target
from dflash.trainer import Trainer

log = logging.getLogger(__name__)


class Interrupted(Exception):
    """A signal asked the run to end: the step is finished and a checkpoint written. Not an error."""


@dataclass(frozen=True, slots=True)
class Until:
    """Where this process stops at the latest. Absolute, so that one that is started again does not get more."""

    epoch: int | None = None  # epochs done
    time: float | None = None  # seconds since 1970


NO_LIMIT = Until()


def train(path: Path, tokens: Path, until: Until = NO_LIMIT) -> None:
    """Train the run at `path` on a token cache and write train.json.

    Raises Interrupted after SIGTERM or SIGINT, RunLocked, ConfigMismatch when a setting that changes the curve differs
    from the run's own, CheckpointCorrupt, StageFailed.
    """
    with checkpoint.run_lock(path), stop_signals() as stopping:
        opened = open_run(path, tokens)
        start = checkpoint.newest(opened.run.checkpoints)
        if start is not None:
            refuse_changed(start.state.settings, opened.settings())
            if start.state.epoch >= opened.config.training.epochs:
                log.info("all %d epochs are trained: nothing left", start.state.epoch)
                if not (path / "train.json").exists():  # killed between the last checkpoint and its result
                    opened.run.write("train.json", result(opened, start, None))
                return
        _Run(opened, start, stopping, until).run()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that a step can be finished; a second signal acts as usual."""
    event = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: FrameType | None) -> None:
        log.warning("%s: finishing the step, then a checkpoint", signal.Signals(number).name)
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """One process's part of a run: what its steps add to, and what its checkpoints are made from."""

    def __init__(self, opened: OpenRun, resumed: Checkpoint | None, stopping: threading.Event, until: Until) -> None:
        self.opened, self.resumed, self.stopping, self.until = opened, resumed, stopping, until
        self.training = opened.config.training
        self.plan = Plan(opened.store, opened.config)
        threads = resumed.state.threads if resumed else cpu_threads()
        torch.set_num_threads(threads)
        devices = place(opened.config.target)
        log.info("loading the target %s", opened.config.target.model)
        self.targets = [Target.load(opened.config.target, opened.shape.taps, device) for device in devices.targets]
        start = resumed or first_checkpoint(opened, self.targets[0], threads)
        self.trainer = load_trainer(opened, self.targets[0], devices, start)
        self.state = start.state
        self.window = Window(**start.state.window)
        self.features = open_features(opened) if self.training.features == "reuse" else None
        self.pipeline = Pipeline(self.plan, self.trainer, self.targets, self.features, threads)

    def run(self) -> None:
        """Train to the end of this run's part and write train.json."""
        start, training, run = self.state, self.training, self.opened.run
        run.rewind_metrics(start.epoch, start.step)
        if self.features is not None:
            self._fill_features(self.features)
        end = training.epochs
        if training.epochs_per_run is not None:
            end = min(end, start.epoch + training.epochs_per_run)
        if self.until.epoch is not None:
            end = min(end, self.until.epoch)
        total = sum(self.plan.steps(epoch) for epoch in range(training.epochs))
        log.info(
            "training from epoch %d step %d, %d of %d steps done", start.epoch, start.step, start.steps_total, total
        )
        self.progress = Progress(run, "train", total, "steps", start.steps_total)
        self.began = self.lined = self.stepped = time.monotonic()
        self.pipeline.run(start.epoch, start.step, end, self._on_step)
        done = self._save()
        run.write("train.json", result(self.opened, done, self.resumed, self.pipeline.stages()))
        if self.stopping.is_set() and done.state.epoch < training.epochs:
            raise Interrupted

    def _on_step(self, report: StepReport) -> bool:
        """Keep count, write what is due, say whether to go on."""
        training, now = self.training, time.monotonic()
        self.window.add(report)
        done = self.state.steps_total + 1
        stages = self.pipeline.stages()
        if done % training.log_every_steps == 0:
            write_line(self.opened.run, self.window, report, stages, now - self.lined)
            log.info("epoch %d step %d: loss %.4f, lr %.2e", report.epoch, report.step, report.loss, report.lr)
            self.window, self.lined = Window(), now
        ended = report.step + 1 == report.steps_in_epoch
        self.state = replace(
            self.state,
            epoch=report.epoch + 1 if ended else report.epoch,
            step=0 if ended else report.step + 1,
            steps_total=done,
            bad_steps=self.trainer.bad_steps,
            tokens=self.state.tokens + report.tokens,
            seconds=self.state.seconds + now - self.stepped,
            window=self.window.to_json(),
        )
        self.stepped = now
        busy = ", ".join(f"{name} {share['busy']:.0%}" for name, share in stages.items())
        self.progress.update(done, f"loss {report.loss:.3f}, busy: {busy}")
        if done % training.checkpoint_every_steps == 0:
            self._save()
        late = training.stop_after_s is not None and now - self.began >= training.stop_after_s
        late |= self.until.time is not None and time.time() >= self.until.time
        return not (late or self.stopping.is_set())

    def _save(self) -> Checkpoint:
        """Write a checkpoint of the current position; the features that later epochs need come first."""
        if self.features is not None:
            self.features.flush()
        directory = self.opened.run.checkpoints
        weights = dict(self.trainer.drafter.state_dict())
        saved = checkpoint.save(directory, self.state, weights, self.trainer.optimizer_tensors())
        checkpoint.prune(directory, self.training.keep)
        return saved

    def _fill_features(self, features: FeatureStore) -> None:
        """Compute what the store lacks of the part of the first epoch that is already trained.

        A lost store is thus made again as it was, from the first epoch's own micro-batches.
        """
        start = self.state
        first = self.plan.work(0, 0, 1)
        before = [(p, rows) for p, rows in first if (p.epoch, p.step) < (start.epoch, start.step)]
        lacking = [(p, rows) for p, rows in before if not features.has(rows)]
        if not lacking:
            return
        log.info("features of %d micro-batches are missing: computing them again", len(lacking))
        progress = Progress(self.opened.run, "features", len(lacking), "micro-batches")
        buffers = Buffers(self.plan.buffer_tokens)
        for position, row_ids in lacking:
            batch = make_batch(self.opened.store, row_ids, position, self.plan.blocks, buffers)
            batch_features(self.targets[0], features, batch)
            progress.advance()
        features.flush()


def first_checkpoint(opened: OpenRun, target: Target, threads: int) -> Checkpoint:
    """The checkpoint before the first step: the drafter as it starts, an optimizer that has seen nothing."""
    drafter = new_drafter(opened.shape, opened.config.drafter, target, opened.config.training.seed)
    state = State(epoch=0, step=0, steps_total=0, settings=opened.settings(), threads=threads)
    return checkpoint.save(opened.run.checkpoints, state, dict(drafter.state_dict()), {})


def load_trainer(opened: OpenRun, target: Target, devices: Devices, start: Checkpoint) -> Trainer:
    """The trainer as it was at a checkpoint, with the target's embedding and head on the drafter's device."""
    drafter = load_drafter(opened.shape, start).to(devices.drafter)
    embedding, head = target.ends(devices.drafter)
    trainer = Trainer(drafter, embedding, head, opened.config.training)
    trainer.load_optimizer_tensors(start.optimizer())
    trainer.bad_steps = start.state.bad_steps
    return trainer


def load_drafter(shape: DrafterShape, start: Checkpoint) -> Drafter:
    """A checkpoint's drafter, float32, on the CPU."""
    drafter = Drafter(shape).float()
    drafter.load_state_dict(start.drafter())
    return drafter


def open_features(opened: OpenRun) -> FeatureStore:
    """The run's own store of features, keyed by all that its values depend on."""
    settings = opened.settings()
    names = (
        "token cache",
        "target.model",
        "target.dtype",
        "drafter.taps",
        "training.tokens_per_batch",
        "training.seed",
    )
    width = len(opened.shape.taps) * opened.shape.hidden_size
    key = {name: settings[name] for name in names}
    return FeatureStore.open(opened.run.path / "features", opened.store.offsets, width, key)


def result(
    opened: OpenRun, done: Checkpoint, resumed: Checkpoint | None, stages: dict[str, dict[str, float]] | None = None
) -> dict[str, Any]:
    """What train.json says; `stages` are by default those of the last line of metrics.jsonl."""
    state, training = done.state, opened.config.training
    lines = list(opened.run.metric_lines())
    stages = stages or (lines[-1]["stages"] if lines else {})
    return {
        "finished": state.epoch >= training.epochs,
        "epochs_done": state.epoch,
        "epochs": training.epochs,
        "steps": state.steps_total,
        "loss_first": lines[0]["loss"] if lines else None,
        "loss": recent_loss(opened.run),
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_s": state.tokens / state.seconds if state.seconds else None,
        "stages": stages,
        "bottleneck": bottleneck(stages),
        "resumed_from": resumed.path.name if resumed else None,
        "checkpoint": str(done.path),
        "features_reused": training.features == "reuse",
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": state.threads,
    }
