"""Checkpoints: whole or skipped, what they hold, one writer, and what a full disk does to a run."""

import json
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash.errors import CheckpointCorrupt, ConfigMismatch, RunLocked, StageFailed
from dflash.pipeline.feature_store import FeatureStore
from dflash.training import checkpoint
from dflash.training.checkpoint import State, Writer
from dflash.training.train import train

DRAFTER = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
OPTIMIZER = {"step.b": torch.tensor(3.0), "exp_avg.b": torch.zeros(4)}


def state(epoch: int, step: int) -> State:
    return State(epoch=epoch, step=step, steps_total=10 * epoch + step, settings={"training.lr": 1.0}, threads=1)


def save(directory: Path, epoch: int, step: int) -> Path:
    return checkpoint.save(directory, state(epoch, step), DRAFTER, OPTIMIZER).path


def test_checksums_are_made_while_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 12.6 GB back would take seconds of the time that a signal leaves."""
    tensors = DRAFTER | {"t": torch.arange(6.0).view(2, 3).t(), "half": torch.ones(3, dtype=torch.bfloat16)}
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "checksum", None)
        saved = checkpoint.save(tmp_path, state(0, 1), tensors, {}).path
    assert checkpoint.verify(saved).optimizer() == {}
    found = load_file(saved / "drafter.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_a_cut_model_file_is_skipped_with_a_warning(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 0, 9)
    newest = save(tmp_path, 0, 10)
    shutil.copytree(newest, tmp_path / "epoch-000-step-000011.tmp-1")
    (tmp_path / "latest").symlink_to(newest)
    file = newest / "drafter.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises((SafetensorError, ValueError)):
        load_file(file)
    with caplog.at_level(logging.WARNING):
        found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.path.name == "epoch-000-step-000009"
    assert f"has {len(content[:size])} bytes, expected {len(content)}" in caplog.text


def test_a_half_optimizer_or_changed_byte_is_skipped(tmp_path: Path) -> None:
    paths = [save(tmp_path, 0, step) for step in (8, 9, 10)]
    half = paths[2] / "optimizer.safetensors"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    changed = bytearray((paths[1] / "drafter.safetensors").read_bytes())
    changed[-1] ^= 1
    (paths[1] / "drafter.safetensors").write_bytes(changed)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.path == paths[0]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    for epoch, step in ((0, 999_999), (2, 0), (10, 999_999), (10, 1_000_000), (9, 7)):
        save(tmp_path, epoch, step)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.state.epoch, found.state.step) == (10, 1_000_000)


def test_only_damaged_ones_are_an_error_and_stay(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"none of the 1 checkpoints .* verifies"):
        checkpoint.newest(tmp_path)
    assert path.exists()
    assert checkpoint.newest(tmp_path / "absent") is None


def test_a_run_saves_the_drafter_alone(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("keys", epochs=1, epochs_per_run=1)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    saved = {name: value for name, value in tiny.weights(run).items() if name.startswith("drafter.")}
    assert {name.split(".")[1] for name in saved} == {"fc", "hidden_norm", "layers", "norm"}
    assert all(value.dtype == torch.float32 for value in tiny.weights(run).values())
    size = sum(4 * value.numel() for value in saved.values())
    newest = max((run / "checkpoints").iterdir())
    assert size <= (newest / "drafter.safetensors").stat().st_size <= size + 8192
    moments = load_file(newest / "optimizer.safetensors")
    assert {name.split(".")[0] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}


def test_the_first_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(6):
        save(tmp_path, 0, step)
    (tmp_path / "epoch-000-step-000009.tmp-77").mkdir()
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["0", "4", "5"]


def test_the_best_by_tau_is_the_one_to_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.best(tmp_path) is None
    measured = save(tmp_path, 1, 0)
    newest = save(tmp_path, 2, 0)
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert found.path == newest, "τ was never measured"
    best = {"tau": 2.0, "checkpoint": measured.name}
    last = checkpoint.save(tmp_path, replace(state(3, 0), best=best), DRAFTER, OPTIMIZER).path
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert found.path == measured
    (measured / "state.json").unlink()
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert found.path == last
    assert "takes the place of the best one" in caplog.text


def test_the_writer_saves_the_values_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the files are written; a second checkpoint waits for the first."""
    written, go = checkpoint.save, threading.Event()

    def slow(*arguments: Any) -> Any:
        go.wait()
        return written(*arguments)

    monkeypatch.setattr(checkpoint, "save", slow)
    writer, weight = Writer(tmp_path, keep=9), torch.zeros(3)
    writer.save(state(0, 1), {"w": weight}, {})
    weight += 1
    assert not any(tmp_path.glob("epoch*"))
    go.set()
    writer.save(state(0, 2), {"w": weight}, {})
    saved = writer.finish()
    assert saved is not None
    assert load_file(tmp_path / "epoch-000-step-000001" / "drafter.safetensors")["w"].tolist() == [0, 0, 0]
    assert saved.drafter()["w"].tolist() == [1, 1, 1]


def test_a_failed_write_is_raised_with_what_to_do(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer = Writer(tmp_path, keep=1, before=fail)
    writer.save(state(0, 1), DRAFTER, OPTIMIZER)
    with pytest.raises(StageFailed, match=r"No space left on device.*Free some or lower"):
        writer.finish()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 400 kB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", path]).returncode:
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_fails_clearly_and_loses_nothing(
    small_disk: Path, target: Path, tokens: Path, make_run: Callable[..., Path]
) -> None:
    settings = {"epochs": 3, "checkpoint_every_steps": 2, "keep": 99}
    run = tiny.make_run(small_disk / "run", target, **settings)
    log = small_disk.parent / "log"
    tiny.run(["train", run, "--tokens", tokens], log, expected=1)
    assert "No space left on device" in log.read_text()
    assert "Free some or lower training.keep" in log.read_text()
    kept = sorted((run / "checkpoints").iterdir())
    assert checkpoint.verify(kept[-1]).state.steps_total > 0
    for path in kept[1:-1]:
        shutil.rmtree(path)
    config = json.loads((run / "config.json").read_text())
    config["training"]["keep"] = 1
    (run / "config.json").write_text(json.dumps(config))
    tiny.run(["train", run, "--tokens", tokens], log)
    undisturbed = make_run("undisturbed", **settings)
    tiny.run(["train", undisturbed, "--tokens", tokens], log)
    tiny.assert_equal(run, undisturbed)


def test_reused_features_ask_for_their_disk_before_the_start(small_disk: Path, target: Path, tokens: Path) -> None:
    run = tiny.make_run(small_disk / "run", target, features="reuse", drafter={"taps": [0, 1, 2, 3]})
    with (small_disk / "ballast").open("wb") as stream:
        stream.write(bytes(shutil.disk_usage(small_disk).free - 150_000))
    log = small_disk.parent / "log"
    tiny.run(["train", run, "--tokens", tokens], log, expected=2)
    assert "training.features=reuse needs" in log.read_text()
    assert not (run / "features").exists()


def open_store(path: Path, offsets: np.ndarray, taps: list[int]) -> FeatureStore:
    FeatureStore.make(path, offsets, 4, {"taps": taps})
    return FeatureStore(path, offsets, 4)


def test_a_half_filled_store_goes_on(tmp_path: Path) -> None:
    offsets = np.array([0, 2, 5])
    values, row = torch.arange(12.0).view(1, 3, 4).bfloat16(), np.array([1])
    store = open_store(tmp_path / "features", offsets, [1])
    store.put(row, values)
    other = FeatureStore(tmp_path / "features", offsets, 4)
    assert other.has(row), "the processes of one machine see each other's rows"
    assert torch.equal(other.get(row, 3), values)
    assert not open_store(tmp_path / "features", offsets, [1]).has(row), "not durable before a checkpoint"
    store = open_store(tmp_path / "features", offsets, [1])
    store.put(row, values)
    store.flush()
    again = open_store(tmp_path / "features", offsets, [1])
    assert torch.equal(again.get(row, 3), values)
    assert again.has(row)
    assert not again.has(row - 1)


def test_features_of_other_taps_are_not_used(make_run: Callable[..., Path], tokens: Path, tmp_path: Path) -> None:
    """The taps are stored beside the features; a run whose taps have changed is refused before it looks at them."""
    offsets, rows = np.array([0, 3, 5]), np.array([0, 1])
    store = open_store(tmp_path / "features", offsets, [1, 9, 17])
    store.put(rows, torch.ones(2, 3, 4, dtype=torch.bfloat16))
    store.flush()
    assert open_store(tmp_path / "features", offsets, [1, 9, 17]).has(rows)
    assert not open_store(tmp_path / "features", offsets, [1, 17, 33]).has(rows)
    run = make_run("taps", epochs=2, epochs_per_run=1, features="reuse")
    train(run, tokens)
    config = json.loads((run / "config.json").read_text())
    config["drafter"]["taps"] = [2, 3]
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigMismatch, match=r"drafter\.taps: started with \[1, 3\], now \[2, 3\]"):
        train(run, tokens)


def hold(run: Path) -> None:
    with checkpoint.run_lock(run):
        (run / "held").touch()
        threading.Event().wait()


def test_a_second_process_is_refused_by_host_and_process(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("locked")
    command = tiny.start(["train", run, "--tokens", tokens], run / "log", partial(hold, run))
    tiny.wait_for(run / "held")
    with pytest.raises(RunLocked, match=f"process {command.pid} on {socket.gethostname()}"), checkpoint.run_lock(run):
        pass
    tiny.run(["train", run, "--tokens", tokens], run / "log-2", expected=2)
    assert json.loads((run / "error-train.json").read_text())["type"] == "RunLocked"
    command.process.kill()
    command.wait()
    with checkpoint.run_lock(run):  # the kernel let go of it
        pass


def change(run: Path, **training: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    config["training"] |= training
    (run / "config.json").write_text(json.dumps(config))


def test_changed_settings_are_refused_by_name_or_recorded(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("changed", epochs=3)
    command = ["train", run, "--tokens", tokens]
    tiny.run([*command, "--until-epoch", "1"], run / "log")
    change(run, epochs=5, lr=1e-4, log_every_steps=2)
    tiny.run(command, run / "log", expected=2)
    message = json.loads((run / "error-train.json").read_text())["message"]
    assert "training.epochs: started with 3, now 5" in message
    assert "training.lr: started with 0.005, now 0.0001" in message
    assert "log_every_steps" not in message
    tiny.run([*command, "--override"], run / "log")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    override = next(line for line in history if line["event"] == "override")
    assert override["changed"] == {"training.epochs": [3, 5], "training.lr": [0.005, 0.0001]}

    # Parameters that are proposed are the run's own once they are accepted, and not before.
    accepted = json.loads((run / "config.json").read_text())
    for changes, code in (({"lr": 2e-4}, 2), ({"keep": 7}, 0)):
        proposed = accepted | {"training": accepted["training"] | changes}
        (run / "proposed.json").write_text(json.dumps(proposed))
        tiny.run([*command, "--config", "proposed.json"], run / "log", expected=code)
        assert (json.loads((run / "config.json").read_text()) == proposed) == (code == 0)
    assert override["checkpoint"] == "epoch-001-step-000000"
    assert json.loads((run / "train.json").read_text())["epochs_done"] == 5
    tiny.run(command, run / "log")  # the new settings are the run's own now


def test_a_checkpoint_is_due_after_some_seconds_too(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("timed", epochs=1, checkpoint_every_steps=10_000, checkpoint_every_s=1e-6, keep=99)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    steps = json.loads((run / "train.json").read_text())["steps"]
    # The first, the last, and after every step at whose end the one before was written.
    assert 2 < len(list((run / "checkpoints").iterdir())) <= steps + 1


def nothing_counts() -> None:
    from dflash.pipeline import train_plan as work

    work.block_counts = lambda mask, anchor, size: np.zeros((anchor.size, size), dtype=bool)


def test_a_run_without_supervised_tokens_is_no_success(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("nothing", epochs=1)
    tiny.run(["train", run, "--tokens", tokens], run / "log", expected=1, before=nothing_counts)
    assert "0 supervised slots" in (run / "log").read_text()
    assert not (run / "train.json").exists()


def bad_features() -> None:
    """Every step from the fourth on is not finite."""
    from dflash.training.step import Trainer

    accumulate, calls = Trainer.accumulate, [0]

    def poisoned(self: Trainer, item: Any) -> None:
        calls[0] += 1
        if calls[0] > 6:
            item.features.fill_(float("nan"))
        accumulate(self, item)

    Trainer.accumulate = poisoned  # type: ignore[method-assign]


def test_not_finite_steps_in_a_row_end_the_run_with_finite_weights(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("nan", epochs=3)
    tiny.run(["train", run, "--tokens", tokens], run / "log", expected=1, before=bad_features)
    assert "10 steps in a row were skipped" in json.loads((run / "error-train.json").read_text())["message"]
    assert all(value.isfinite().all() for value in tiny.weights(run).values())
