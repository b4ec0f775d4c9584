"""The run directory: what lies where, and what a person or a flow can read of a run while it goes on.

config.json     the resolved parameters            checkpoints/    dflash/training/checkpoint.py
metrics.jsonl   one line per log_every_steps       features/       dflash/pipeline/feature_store.py
tensorboard/    the same as curves                 dflash/training/curves.py
progress-STAGE.json  where a stage stands          train.json, evaluation.json, export.json, report.html
history.jsonl   who trained what and when, and settings that were overridden
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cache.json_file import write_json, write_text
from dflash.config import RunConfig
from dflash.errors import ConfigMismatch

CONFIG = "config.json"


def report_name(kind: str, stage: str) -> str:
    """The file of `progress` or `error` of a stage: several stages may be at work in one run directory."""
    return f"{kind}-{stage}.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    path: Path
    config_name: str = CONFIG  # of the parameters to read: those of the run, or those that are proposed for it

    def accept_config(self) -> None:
        """What was proposed is from now on what the run is made with. Its caller holds the run's lock."""
        if self.config_name != CONFIG:
            (self.path / self.config_name).replace(self.path / CONFIG)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def config(self) -> RunConfig:
        """The parameters of the run that concern this package; name, home and rows are the flow's.

        Raises ConfigMismatch naming the field that is wrong.
        """
        file = self.path / self.config_name
        try:
            tree = json.loads(file.read_text())
            return RunConfig.model_validate({k: v for k, v in tree.items() if k not in ("name", "home", "rows")})
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigMismatch(f"{file} cannot be read: {error}. It holds the run's parameters.") from error
        except ValidationError as error:
            fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigMismatch(f"{file}: {fields}") from error

    def read(self, name: str) -> dict[str, Any]:
        """A result of an earlier stage. Raises ConfigMismatch when the stage has not run."""
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigMismatch(
                f"{self.path / name} cannot be read: {error}. Run the stage that writes it first."
            ) from error
        return value

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Store a stage's result."""
        write_json(self.path / name, value)

    def record(self, event: str, **facts: Any) -> None:
        """Add a line to the run's history."""
        who = {"event": event, "time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        with (self.path / "history.jsonl").open("a") as stream:
            stream.write(json.dumps(who | facts) + "\n")

    def metric_lines(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics.jsonl; a last line that a killed process left half is not one."""
        if not self.metrics.exists():
            return
        for line in self.metrics.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def rewind_metrics(self, epoch: int, step: int) -> None:
        """Drop the lines past a checkpoint: the steps behind them are about to be done again."""
        kept = [
            line
            for line in self.metric_lines()
            if (line["epoch"], line["step"] + 1) <= (epoch, step) or line["epoch"] < epoch
        ]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


class ProgressFile:
    """progress-STAGE.json: at most two writes a second, and one at the end."""

    def __init__(
        self, run: RunDirectory, stage: str, total: int, unit: str, done: int = 0, within: str | None = None
    ) -> None:
        """`within`: the stage whose process this part of it is done in."""
        self._file = run.path / report_name("progress", within or stage)
        self._stage, self._total, self._unit = stage, total, unit
        self._first = self._done = done
        self._start = time.monotonic()
        self._written = 0.0
        self.update(done)

    def update(self, done: int, message: str = "", left_s: float | None = None) -> None:
        """Say how far the stage is; `left_s` where the time left is known better than by the pace so far."""
        self._done = done
        now = time.monotonic()
        if now - self._written < 0.5 and done < self._total:
            return
        self._written = now
        seconds = now - self._start
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        value = {
            "stage": self._stage,
            "done": done,
            "total": self._total,
            "unit": self._unit,
            "rate": rate,
            "seconds": seconds,
            "eta_s": left_s if left_s is not None else (self._total - done) / rate if rate > 0 else None,
            "message": message,
        }
        write_json(self._file, value, durable=False)

    def advance(self, message: str = "") -> None:
        """One more unit is done."""
        self.update(self._done + 1, message)
