"""Several processes of one run, with gloo: the same step on 1, 2 or 4 of them, deaths, and a restart with fewer."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
import torch
from batches import at, new_trainer, rows, weights_of
from safetensors.torch import load_file

import dflash.training.step
from cache.disk.store import TokenCache
from dflash.distributed import Ranks, joined
from dflash.model.loss import BlockLoss

CONTEXT = multiprocessing.get_context("forkserver")
SETTINGS = {"tokens_per_step": 190, "checkpoint_every_steps": 1, "keep": 99}
slowly = pytest.mark.skipif(
    int(os.environ.get("KILL_ROUNDS", "5")) <= 5, reason="make test-kill: processes that import torch"
)


def become(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(size: int, body: Callable[..., None], *arguments: Any) -> list[Any]:
    """What `body(ranks, *arguments)` returns on each of `size` processes, by rank."""
    queue, port = CONTEXT.Queue(), free_port()
    processes = [
        CONTEXT.Process(target=_enter, args=(rank, size, port, body, queue, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return [found[rank] for rank in range(size)]


def _enter(rank: int, size: int, port: int, body: Callable[..., Any], queue: Any, *arguments: Any) -> None:
    become(rank, size, port)
    torch.set_num_threads(1)
    with joined() as ranks:
        queue.put((rank, body(ranks, *arguments)))


def one_step(ranks: Any, dtype: torch.dtype) -> list[float]:
    """A step of four micro-batches, dealt to the ranks; the weights after it."""
    trainer = new_trainer(ranks, dtype=dtype)
    for seed in range(ranks.rank, 4, ranks.size):
        trainer.accumulate(rows(1 + seed, seed=seed))
    trainer.step(at())
    return weights_of(trainer).tolist()


def stubbed_step(ranks: Any, losses: list[tuple[float, int]]) -> float:
    """A step in which each rank has the given mean loss and number of slots; the loss that it reports."""
    trainer = new_trainer(ranks)
    loss, slots = losses[ranks.rank]

    def forward(*arguments: Any) -> BlockLoss:
        total = trainer.drafter.fc.weight.sum() * 0 + loss * slots
        return BlockLoss(total, torch.tensor(float(slots)), torch.zeros(4), torch.zeros(4))

    dflash.training.step.forward_loss = forward
    trainer.accumulate(rows(1))
    return trainer.step(at()).report().loss


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_step_on_more_processes(size: int, dtype: torch.dtype, tolerance: float) -> None:
    from dflash.distributed import ALONE

    expected = torch.tensor(one_step(ALONE, dtype))
    found = [torch.tensor(values) for values in on_ranks(size, one_step, dtype)]
    assert all(torch.equal(values, found[0]) for values in found), "replicas stay the same, bit for bit"
    assert (found[0] - expected).abs().max() <= tolerance


def test_a_rank_without_supervised_tokens_spreads_no_nan() -> None:
    assert on_ranks(2, stubbed_step, [(0.0, 0), (2.0, 3)]) == [2.0, 2.0]


def test_tokens_weigh_alike_whatever_their_rank() -> None:
    assert on_ranks(2, stubbed_step, [(4.0, 1), (1.0, 3)]) == [1.75, 1.75]


def agreed_start(ranks: Any, directories: list[Path]) -> str | None:
    from dflash.errors import CheckpointCorrupt
    from dflash.training.train import agreed

    try:
        start = agreed(directories[ranks.rank], ranks)
    except CheckpointCorrupt as error:
        return str(error)
    return start and start.path.name


def test_all_processes_start_from_the_leaders_checkpoint(tmp_path: Path) -> None:
    """One that sees a newer checkpoint takes the leader's; one with another content under its name is refused."""
    from dflash.training import checkpoint

    def save(name: str, step: int, weight: float) -> Path:
        state = checkpoint.State(epoch=0, step=step, steps_total=step, settings={}, threads=1)
        checkpoint.save(tmp_path / name, state, {"w": torch.tensor([weight])}, {})
        return tmp_path / name

    newer = [save("a", 3, 1.0), save("b", 3, 1.0)]
    save("b", 4, 2.0)
    assert on_ranks(2, agreed_start, newer) == ["epoch-000-step-000003"] * 2
    unequal = [newer[0], save("c", 3, 5.0)]
    assert all("unequal checkpoints epoch-000-step-000003" in said for said in on_ranks(2, agreed_start, unequal))


def test_what_sums_is_what_the_drafters_device_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a run on the CPU of a machine with GPUs; NCCL is bound to its device, which is not that of the rank."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: asked.append(options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cpu", "cuda:3"):
        Ranks(rank=0, size=2).summing_on(torch.device(device))
    assert [(one["backend"], one["device_id"]) for one in asked] == [("gloo", None), ("nccl", torch.device("cuda:3"))]
    assert all(one["timeout"] >= timedelta(minutes=5) for one in asked), "a compile or a slow disk is no failure"
    assert Ranks().summing_on(torch.device("cuda:0")) == Ranks(), "one process sums nothing"


def a_flipped_bit() -> None:
    """One weight of the second process changes by a bit after the second step."""
    from dflash.training.step import Trainer

    step = Trainer.step

    def flipped(self: Trainer, at: Any) -> Any:
        pending = step(self, at)
        if os.environ["RANK"] == "1" and (at.epoch, at.step) == (0, 2):
            next(iter(self.parameters.values())).data.view(torch.int32).flatten()[7] ^= 1
        return pending

    Trainer.step = flipped  # type: ignore[method-assign]


def test_replicas_that_part_end_the_run_before_a_checkpoint(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("parted", **SETTINGS)
    assert [command.wait() for command in start_ranks(run, tokens, 2, a_flipped_bit)] == [1, 1]
    error = json.loads((run / "error-train.json").read_text())
    assert error["type"] == "StageFailed"
    assert "process 1: step 3, sum" in error["message"]
    assert "process 0" not in error["message"]
    assert sorted(path.name for path in (run / "checkpoints").glob("epoch*"))[-1] == "epoch-000-step-000002"


def start_ranks(
    run: Path, tokens: Path, size: int, before: Callable[[], None] | None = None, command: str = "train"
) -> list[tiny.Command]:
    port = free_port()
    return [
        tiny.start([command, run, "--tokens", tokens], run / f"log-{rank}", partial(_before, rank, size, port, before))
        for rank in range(size)
    ]


def _before(rank: int, size: int, port: int, more: Callable[[], None] | None) -> None:
    become(rank, size, port)
    if more is not None:
        more()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target: Path, tokens: Path) -> Path:
    """The run on one process; its step has three micro-batches, so two ranks get unequal shares."""
    run = tiny.make_run(tmp_path_factory.mktemp("runs") / "alone", target, **SETTINGS)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    return run


def difference(left: Path, right: Path, name: str) -> float:
    files = [run / "checkpoints" / name / "drafter.safetensors" for run in (left, right)]
    a, b = (load_file(file) for file in files)
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def test_two_processes_train_the_run_of_one(make_run: Callable[..., Path], tokens: Path, alone: Path) -> None:
    run = make_run("two", **SETTINGS)
    assert [command.wait() for command in start_ranks(run, tokens, 2)] == [0, 0]
    # AdamW's first step is lr·g/(|g| + ε). Sums in another order round g by about 1e-11, a thousandth of ε = 1e-8, so a
    # weight whose gradient is as small moves by up to lr/1000 = 5e-6 otherwise; twice that is allowed.
    assert difference(run, alone, "epoch-000-step-000001") <= 1e-5
    assert difference(run, alone, "epoch-002-step-000000") <= 1e-4
    both = [[json.loads(line) for line in (r / "metrics.jsonl").read_text().splitlines()] for r in (run, alone)]
    assert [line["tokens"] for line in both[0]] == [line["tokens"] for line in both[1]], "every row once"


def test_a_killed_rank_ends_the_other_and_one_goes_on_alone(
    make_run: Callable[..., Path], tokens: Path, alone: Path
) -> None:
    run = make_run("fewer", **SETTINGS)
    first, second = start_ranks(run, tokens, 2, tiny.slow_steps)
    tiny.wait_for(run / "checkpoints" / "epoch-000-step-000003")
    os.kill(second.pid, signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    assert first.wait(60) == 1
    assert json.loads((run / "error-train.json").read_text())["type"] == "StageFailed"
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    assert difference(run, alone, "epoch-002-step-000000") <= 1e-4


def short_timeout() -> None:
    """A step's sums wait for 8 s instead of ten minutes; steps are slow."""
    from dflash import distributed as ranks

    ranks._TIMEOUT = timedelta(seconds=8)
    tiny.slow_steps()


@slowly
def test_a_rank_that_vanishes_without_a_word_ends_the_other(make_run: Callable[..., Path], tokens: Path) -> None:
    """As a lost machine does: it is stopped, so its connections stay open."""
    run = make_run("vanished", tokens_per_step=190, epochs=40, checkpoint_every_steps=20)
    first, second = start_ranks(run, tokens, 2, short_timeout)
    tiny.wait_for(run / "checkpoints" / "epoch-005-step-000000")
    os.kill(second.pid, signal.SIGSTOP)
    try:
        assert first.wait(60) == 1
    finally:
        second.process.kill()
    assert json.loads((run / "error-train.json").read_text())["type"] == "StageFailed"


def no_anchors() -> None:
    """The second process finds no legal anchor in any of its rows."""
    from dflash.pipeline import train_plan as work

    if os.environ["RANK"] == "1":
        work.draw_anchors = lambda mask, **_: np.zeros(0, dtype=np.int64)


def test_a_rank_without_a_legal_anchor_holds_nobody_up(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("anchorless", **SETTINGS)
    assert [command.wait() for command in start_ranks(run, tokens, 2, no_anchors)] == [0, 0]
    assert all(value.isfinite().all() for value in tiny.weights(run).values())
    result = json.loads((run / "train.json").read_text())
    assert result["finished"]
    assert not result["skipped"], "the other process had some in every step"


def test_a_signal_to_one_rank_stops_both_at_one_step(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("stopped", tokens_per_step=190, epochs=8, checkpoint_every_steps=2)
    commands = start_ranks(run, tokens, 2, tiny.slow_steps)
    tiny.wait_for(run / "checkpoints" / "epoch-001-step-000000")
    os.kill(commands[1].pid, signal.SIGTERM)
    assert [command.wait() for command in commands] == [75, 75]
    assert not json.loads((run / "train.json").read_text())["finished"]


def slow_evaluation_and_disk() -> None:
    """The second process evaluates, and the first writes, for longer than a step's sums may take."""
    import dflash.distributed
    from dflash.training import checkpoint
    from dflash.training.monitor import Monitor

    tau, save = Monitor.tau, checkpoint.save

    def slow_tau(self: Monitor, drafter: Any) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(4)
        return tau(self, drafter)

    def slow_save(directory: Path, state: Any, *tensors: Any) -> Any:
        if state.steps_total == 2:
            time.sleep(4)
        return save(directory, state, *tensors)

    dflash.distributed._TIMEOUT = timedelta(seconds=2)
    Monitor.tau, checkpoint.save = slow_tau, slow_save  # type: ignore[method-assign]


def taus(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    return [line["value"] for line in lines if line["event"] == "tau"]


def test_slow_evaluation_or_disk_kills_nobody(make_run: Callable[..., Path], tokens: Path) -> None:
    """And τ is that of all held-out rows, which the processes deal among them."""
    settings = {"epochs": 1, "tokens_per_step": 256, "evaluate_every_steps": 2, "checkpoint_every_steps": 1}
    run, one = make_run("slow", **settings), make_run("one", **settings)
    commands = start_ranks(run, tokens, 2, slow_evaluation_and_disk)
    assert [command.wait() for command in commands] == [0, 0], (run / "log-0").read_text()[-3000:]
    tiny.run(["train", one, "--tokens", tokens], one / "log")
    assert len(taus(run)) == len(taus(one)) > 0
    assert taus(run) == pytest.approx(taus(one), abs=1e-9)


def test_processes_share_an_evaluation(alone: Path, tokens: Path) -> None:
    """τ and the decoded texts do not depend on their number."""
    said = []
    for size in (1, 2):
        commands = start_ranks(alone, tokens, size, command="evaluate")
        assert [command.wait() for command in commands] == [0] * size, (alone / "log-0").read_text()[-3000:]
        value = json.loads((alone / "evaluation.json").read_text())
        said.append([value["tau"], value["by_group"], value["samples"], value["decode"]["tau"]])
        (alone / "evaluation.json").unlink()
    assert said[0] == said[1]


def noted_targets() -> None:
    """Every row that the target computes leaves a line in its process's log."""
    from dflash.target.frozen import Target

    features = Target.features

    def noted(self: Target, ids: torch.Tensor) -> torch.Tensor:
        print("target row\n" * len(ids), end="", flush=True)
        return features(self, ids)

    Target.features = noted  # type: ignore[method-assign]


def target_rows(run: Path) -> int:
    return sum(log.read_text().count("target row\n") for log in run.glob("log*"))


def test_processes_of_one_machine_reuse_each_others_features(make_run: Callable[..., Path], tokens: Path) -> None:
    # With a size of passes, so that no warm-up runs the target on rows of its own.
    settings = SETTINGS | {"features": "reuse", "epochs": 3, "pass_slots": 10_000}
    one, both, fewer = (make_run(name, **settings) for name in ("one", "both", "fewer"))
    tiny.run(["train", one, "--tokens", tokens], one / "log", before=noted_targets)
    assert [command.wait() for command in start_ranks(both, tokens, 2, noted_targets)] == [0, 0]
    assert target_rows(both) == target_rows(one) == TokenCache.open(tokens).rows(0).size, "once, in the first epoch"
    first, second = start_ranks(fewer, tokens, 2, tiny.slow_steps)
    tiny.wait_for(fewer / "checkpoints" / "epoch-000-step-000003")
    os.kill(second.pid, signal.SIGKILL)
    assert [first.wait(60), second.wait()] == [1, -signal.SIGKILL]
    tiny.run(["train", fewer, "--tokens", tokens], fewer / "log")
    for run in (both, fewer):
        # Other rows ran beside each: the last bits of its float32 sums may differ, and so a rounding to bfloat16.
        torch.testing.assert_close(kept_features(run), kept_features(one), rtol=2**-7, atol=1e-6)
        assert difference(run, one, "epoch-003-step-000000") <= 1e-4


def kept_features(run: Path) -> torch.Tensor:
    return torch.from_file(str(run / "features/values.bin"), size=878 * 64, dtype=torch.bfloat16).float()


def on_machines_of_their_own() -> None:
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def test_processes_of_several_machines_reuse_only_what_is_filled(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("machines", features="reuse", epochs=3)
    assert 2 in [command.wait() for command in start_ranks(run, tokens, 2, on_machines_of_their_own)]
    assert "is not filled yet" in (run / "error-train.json").read_text()
    tiny.run(["train", run, "--tokens", tokens, "--until-epoch", "1"], run / "log")
    assert [command.wait() for command in start_ranks(run, tokens, 2, on_machines_of_their_own)] == [0, 0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, target: Path, tokens: Path) -> Path:
    """The run on two processes that nothing disturbed."""
    run = tiny.make_run(tmp_path_factory.mktemp("runs") / "two", target, **SETTINGS)
    assert [command.wait() for command in start_ranks(run, tokens, 2)] == [0, 0]
    return run


def torchrun(run: Path, tokens: Path, *options: str, slow: bool = False) -> subprocess.Popen[bytes]:
    """`torchrun OPTIONS -m dflash train RUN --tokens TOKENS`; with `slow`, every step takes 20 ms longer."""
    program = ["-m", "dflash"]
    if slow:
        script = run / "slow.py"
        script.write_text(
            "import sys, tiny\nfrom dflash.__main__ import main\ntiny.slow_steps()\n"
            "if __name__ == '__main__':\n    sys.exit(main())\n"
        )
        program = [str(script)]
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parents[1]}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program, "train", run, "--tokens", tokens]
    return subprocess.Popen(command, env=environment)  # type: ignore[arg-type]


def assert_went_on_with_one(run: Path, two: Path, alone: Path) -> None:
    """From the newest checkpoint of two processes, with the same step as theirs, to the end of the plan."""
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    starts = [line for line in lines if line["event"] == "start"]
    assert [line["processes"] for line in starts] == [2, 1]
    step = starts[1]["step"] + 1
    assert starts[1]["epoch"] == 0
    names = [f"epoch-000-step-{number:06d}" for number in (step - 1, step)]
    assert difference(run, two, names[0]) == 0
    assert 0 < difference(run, two, names[1]) <= 1e-6
    assert difference(run, alone, "epoch-002-step-000000") <= 1e-4


@slowly
def test_a_rank_of_torchrun_is_killed_then_one_goes_on(
    make_run: Callable[..., Path], tokens: Path, two: Path, alone: Path
) -> None:
    run = make_run("killed", **SETTINGS)
    agent = torchrun(run, tokens, "--standalone", "--nproc-per-node=2", slow=True)
    tiny.wait_for(run / "checkpoints" / "epoch-000-step-000003")
    family = psutil.Process(agent.pid).children(recursive=True)
    ranks = {process.environ()["RANK"]: process for process in family if "RANK" in process.environ()}
    killed = time.monotonic()
    ranks["1"].kill()
    assert agent.wait(60) == 1
    assert not psutil.wait_procs(family, timeout=5)[1], "nothing outlives it"
    print(f"\nkilled rank: the rest ended after {time.monotonic() - killed:.1f} s")
    assert torchrun(run, tokens, "--standalone", "--nproc-per-node=1").wait(200) == 0
    assert_went_on_with_one(run, two, alone)


@slowly
def test_a_node_of_torchrun_dies_and_the_other_goes_on_by_itself(
    make_run: Callable[..., Path], tokens: Path, two: Path, alone: Path
) -> None:
    run = make_run("elastic", **SETTINGS)
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    first, second = (  # the one that dies is not the one that all of them meet at
        torchrun(run, tokens, *options, f"--rdzv-conf=last_call_timeout=3,is_host={host}", slow=True)
        for host in ("true", "false")
    )
    tiny.wait_for(run / "checkpoints" / "epoch-000-step-000003")
    family = psutil.Process(second.pid).children(recursive=True)
    for process in [psutil.Process(second.pid), *family]:
        process.kill()
    second.wait()
    assert first.wait(200) == 0
    assert_went_on_with_one(run, two, alone)


@slowly
def test_two_torchrun_nodes_train_the_run_of_one(make_run: Callable[..., Path], tokens: Path, alone: Path) -> None:
    run = make_run("nodes", **SETTINGS)
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = [torchrun(run, tokens, *options, f"--node-rank={node}") for node in (0, 1)]
    assert [node.wait(200) for node in nodes] == [0, 0]
    assert difference(run, alone, "epoch-002-step-000000") <= 1e-4
