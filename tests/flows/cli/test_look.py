"""`ls`, `status` and `logs` of runs that train, have stopped, failed, died or finished."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import flows.__main__ as flows_cli
from cache.locks import held, holders, lock_of
from flows.show.standing import SILENT_S, standing, tail

ROOT = Path(__file__).resolve().parents[3]


def lines_of(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_run(home: Path, name: str, *events: dict[str, Any], **files: Any) -> Path:
    """A run directory of two epochs of three, as a training leaves it."""
    run = home / "runs" / name
    (run / "checkpoints/epoch-002-step-000000").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "config.json").write_text(json.dumps({"name": name, "training": {"epochs": 3}}))
    line = {"epoch": 1, "step": 9, "loss": 2.0, "loss_sum": 20.0, "weight_sum": 10.0, "tokens_per_s": 1234.0}
    line |= {"stages": {"target": {"busy": 0.91, "starved": 0.0, "blocked": 0.0}}, "bottleneck": "The target is it."}
    (run / "metrics.jsonl").write_text(lines_of(line, line | {"loss_sum": 40.0}) + '{"half')
    (run / "history.jsonl").write_text(lines_of(*events))
    for file, content in files.items():
        (run / f"{file.replace('_', '-')}.json").write_text(json.dumps(content))
    return run


START, END = {"event": "start", "time": 1.0}, {"event": "end", "time": 2.0}
TAU = {"event": "tau", "time": 1.5, "value": 1.25, "se": 0.03, "checkpoint": "epoch-001-step-000005"}
ERROR = {"type": "StageFailed", "message": "all is lost\nmore", "traceback": ""}


@pytest.mark.parametrize(
    ("events", "files", "state"),
    [
        ((START, TAU), {}, "died"),
        ((START, TAU, END), {}, "stopped"),
        ((START, TAU, END), {"train": {"finished": False}}, "stopped"),
        ((START, TAU, END), {"train": {"finished": True}}, "finished"),
        ((START, TAU), {"error_train": ERROR}, "failed"),
        ((START, TAU, END), {"train": {"finished": True}, "error_evaluate": ERROR}, "failed"),
    ],
)
def test_state_of_a_run_that_nobody_is_at(tmp_path: Path, events: Any, files: Any, state: str) -> None:
    one = standing(make_run(tmp_path, "mine", *events, **files))
    assert (one.state, one.holder, one.loss) == (state, None, 3.0)
    assert one.tau is not None
    assert (one.tau["value"], one.epoch, one.epochs) == (1.25, 2.0, 3)


def test_run_at_work_is_known_by_its_locks_and_keeps_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine", START)
    here = f"process {os.getpid()} on {socket.gethostname()}"
    for lock, state in ((lock_of(run), "in use"), (run / ".evaluate.lock", "evaluate"), (run / "lock", "train")):
        with held(lock, wait=False) as is_mine:
            assert is_mine
            assert holders(lock) == [os.getpid()]
            assert (standing(run).state, standing(run).holder) == (state, here)
        assert standing(run).state == "died"


def test_run_of_another_machine_is_at_work_as_long_as_it_writes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine", START)
    (run / "lock").write_text("process 12 on gpu7\n")
    assert (standing(run).state, standing(run).holder) == ("train", "process 12 on gpu7")
    long_ago = time.time() - 2 * SILENT_S
    for file in (run, *run.rglob("*")):
        os.utime(file, (long_ago, long_ago))
    assert (standing(run).state, standing(run).holder) == ("died", None)
    with (run / "history.jsonl").open("a") as stream:
        stream.write(lines_of(END))
    assert standing(run).state == "stopped"


def test_status_says_what_one_asks_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = {"stage": "train", "done": 50, "total": 60, "unit": "steps", "rate": 2.0, "eta_s": 3600.0}
    stages = {"prepare": {"seconds": 3.0}, "train": {"seconds": 7200.0, "fingerprint": "x"}}
    run = make_run(tmp_path, "mine", START, TAU, progress_train=progress, stages=stages)
    (run / "logs/train.log").write_text(
        "2026-01-01 10:00:00,000 INFO x: fine\n2026-01-01 10:00:01,000 WARNING x: step 7 is skipped\n"
    )
    with held(run / "lock"):
        assert flows_cli.main(["status", "mine", "--home", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for part in ("train, process", "2.5/3", "3.000", "1.250 ± 0.030 at epoch-001", "59 min", "of this stage"):
        assert part in said
    for part in (
        "prepare 3.0 s",
        "train 2 h 00 min (done)",
        "target 91%",
        "The target is it.",
        "epoch-002-step-000000",
    ):
        assert part in said
    assert "train: 2026-01-01 10:00:01,000 WARNING x: step 7 is skipped" in said
    assert "fine" not in said


def test_ls_and_status_need_neither_prefect_nor_torch_nor_a_server(tmp_path: Path) -> None:
    make_run(tmp_path, "older", START, END, error_train=ERROR)
    make_run(tmp_path, "newer", START, END)
    code = (
        "import sys, flows.__main__ as f\n"
        f"codes = [f.main([*command, '--home', {str(tmp_path)!r}]) for command in (['ls'], ['status', 'older'])]\n"
        "assert codes == [0, 0]\n"
        "assert not {'torch', 'prefect', 'transformers', 'zarr'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["run", "newer", "older"]
    assert "train: StageFailed: all is lost" in done.stdout


def test_logs_follow_all_stages(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine", START)
    log = run / "logs/train.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    command = [sys.executable, "-m", "flows", "logs", "mine", "-f", "-n", "2", "--home", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert [follower.stdout.readline() for _ in range(2)] == ["train: line 98\n", "train: line 99\n"]
        with log.open("a") as stream:
            stream.write("one more\nhalf")
        assert follower.stdout.readline() == "train: one more\n"
        (run / "logs/evaluate.log").write_text("another stage\n")
        assert follower.stdout.readline() == "evaluate: another stage\n"
        follower.terminate()


def test_tail_reads_no_more_than_the_end(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(lines_of(*({"i": i} for i in range(1000))))
    assert [line["i"] for line in tail(file, 40)] == [997, 998, 999]
    assert len(tail(file)) == 1000
