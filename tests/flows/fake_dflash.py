"""Stands in for `python -m dflash` in tests of flows: the same files, exit codes and signals, no torch, no learning.

Each attempt appends to RUN/attempts. FAKE_FAIL_FIRST attempts of training die after a checkpoint of their own, those in
epoch FAKE_FAIL_IN die without one.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STOPPED: list[int] = []


def write(path: Path, content: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def fail(run: Path, kind: str, module: str, message: str, code: int) -> None:
    write(run / f"error-{sys.argv[1]}.json", {"type": kind, "module": module, "message": message, "traceback": ""})
    sys.exit(code)


def option(name: str) -> str | None:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def checkpoint(run: Path, epoch: int, step: int) -> Path:
    path = run / "checkpoints" / f"epoch-{epoch:03d}-step-{step:06d}"
    path.mkdir(parents=True, exist_ok=True)
    write(path / "state.json", {"epoch": epoch, "step": step})
    return path


def note(run: Path, epoch: int) -> None:
    """The lines of an epoch, as a training writes them."""
    share = {"busy": 0.75, "starved": 0.25, "blocked": 0.0}
    line = {
        "epoch": epoch - 1,
        "step": 9,
        "loss": 9.0 / (1 + epoch),
        "lr": 0.001,
        "tokens_per_s": 123.0,
        "padding": 0.1,
    }
    line |= {
        "coverage": 0.5,
        "stages": {"train": share},
        "bottleneck": "All are busy.",
        "gpu_memory_bytes": {"H200": 2e9},
    }
    event = {"event": "tau", "checkpoint": f"epoch-{epoch:03d}-step-000000", "value": 2 - epoch / 10, "se": 0.01}
    for name, content in (("metrics.jsonl", line), ("history.jsonl", event)):
        with (run / name).open("a") as stream:
            stream.write(json.dumps(content) + "\n")


def train(run: Path, config: dict[str, Any]) -> None:
    with (run / "attempts").open("a") as stream:
        stream.write(" ".join(sys.argv[7:]) + "\n")
    if "FAKE_ERROR" not in os.environ:
        (run / str(option("--config"))).replace(run / "config.json")
    attempt = len((run / "attempts").read_text().splitlines())
    names = sorted((run / "checkpoints").glob("epoch-*")) if (run / "checkpoints").exists() else []
    epoch = int(names[-1].name[6:9]) if names else 0
    epochs = config["training"]["epochs"]
    until = min(epochs, int(option("--until-epoch") or epochs))
    last = checkpoint(run, epoch, 0)
    while epoch < until and not STOPPED:
        for _ in range(int(os.environ.get("FAKE_TICKS_PER_EPOCH", "1"))):
            write(
                run / "progress-train.json",
                {"stage": "train", "done": epoch, "total": epochs, "unit": "epochs", "rate": 1},
            )
            time.sleep(0.05)
            if STOPPED:
                sys.exit(75)
        if epoch == int(os.environ.get("FAKE_FAIL_IN", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        epoch += 1
        note(run, epoch)
        last = checkpoint(run, epoch, 0)
        if attempt <= int(os.environ.get("FAKE_FAIL_FIRST", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind := os.environ.get("FAKE_ERROR"):
            fail(run, kind, "dflash.errors", "as asked", 2)
    stages = {name: {"busy": 3.0, "starved": 1.0, "blocked": 0.0} for name in ("read", "target", "train")}
    result = {"epochs_done": epoch, "epochs": epochs, "steps": 10 * epoch, "loss_first": 9.0, "loss": 9.0 / (1 + epoch)}
    result |= {"tokens": 100, "seconds": 1.0, "tokens_per_s": 100.0, "stages": stages, "bottleneck": "All are busy."}
    write(run / "train.json", {**result, "finished": epoch >= epochs, "resumed_from": None, "checkpoint": str(last)})


def evaluate(run: Path) -> None:
    tau = {"before": {"value": 1.0, "se": 0.01}, "after": {"value": 1.5, "se": 0.02}, "convention": "as decoded"}
    decode = {"prompts": 2, "max_new_tokens": 8, "identical": 2, "near_ties": 0, "lossless": True, "tau": 1.5}
    decode |= {
        "plain_tokens_per_s": 10.0,
        "speculative_tokens_per_s": 8.0,
        "speedup": 0.8,
        "cost": {"break_even_tau": 2.0},
    }
    groups = {"math": {"value": 1.5, "se": None, "rows": 1}}
    write(run / "evaluation.json", {"tau": tau, "accepted_by_slot": [0.5, 0.2], "decode": decode, "by_group": groups})
    (run / "report.html").write_text("<html></html>")


def export(run: Path) -> None:
    path = run / "export" / "dflash"
    path.mkdir(parents=True, exist_ok=True)
    origin = {"run": str(run), "checkpoint": "x"}
    write(path / "origin.json", origin)
    facts = {"path": str(path), "origin": origin, "max_logit_difference": 0.0, "tensors": 3}
    write(run / "export.json", {**facts, "layout": "dflash", "layouts": {"dflash": facts}})


def serve_check(run: Path) -> None:
    said = {"server": "llama.cpp (xllamacpp 1)", "prompts": 2, "identical": 2, "near_ties": 0, "lossless": True}
    said |= {"tau": 1.5, "tau_ours": 1.49, "accepted_by_slot": [0.5, 0.2], "accepted_by_slot_ours": [0.5, 0.19]}
    said |= {"plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 8.0, "speedup": 0.8}
    write(run / "served.json", {**said, "cases": {"two prompts at once": True, "a stop text": False}})


def check(run: Path) -> None:
    fits = "FAKE_TOO_BIG" not in os.environ
    plan: dict[str, Any] = {"rows": 9, "held_out_rows": 1, "steps": 20, "steps_per_epoch": 10, "epochs": 2}
    plan |= {
        "disk_bytes": {"checkpoints": 10**6},
        "free_disk_bytes": 10**9,
        "memory_bytes": {"cpu": 10**6},
        "step_seconds": {"train": 0.5},
    }
    plan |= {"available_memory_bytes": {"cpu": 10**9}, "seconds_total": 10.0, "fits": fits}
    plan |= {"gpus": 1, "processes": 1, "layouts": [], "pass_slots": 1024}
    write(run / "plan.json", {**plan, "refusals": [] if fits else ["It needs 99 TB of disk."]})


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.append(1))
    command, run = sys.argv[1], Path(sys.argv[2])
    if command == "dequantise":
        content = hashlib.sha256(run.read_bytes()).hexdigest()
        directory = Path(sys.argv[3]) / "targets" / content
        directory.mkdir(parents=True)
        write(directory / "config.json", {"vocab_size": 256})
        return
    proposed = run / (option("--config") or "config.json")
    config = json.loads(proposed.read_text())
    with (run / "stages_run").open("a") as stream:
        stream.write(f"{command}\n")
    if command == "train":
        train(run, config)
    else:
        {"evaluate": evaluate, "export": export, "check": check, "serve-check": serve_check}[command](run)


if __name__ == "__main__":
    main()
