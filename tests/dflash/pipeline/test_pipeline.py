"""The pipeline with simulated stages: order, failures, hangs, leases; and the plan's positions, dealt and resumed."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import new_plan
from torch import Tensor

from cache.batches.gather import Buffers
from cache.disk.store import TokenCache
from dflash.batch import FeatureBatch, Step
from dflash.errors import ConfigMismatch, StageFailed
from dflash.pipeline import pipeline as pipeline_run
from dflash.pipeline.channel import Channel, Closed, Reorder, Stop
from dflash.pipeline.device import Lane, Stopwatch
from dflash.pipeline.pipeline import Pipeline, capacity
from dflash.pipeline.telemetry import bottleneck
from dflash.pipeline.train_plan import TrainPlan
from dflash.step_sums import PendingReport

CPU = torch.device("cpu")


class FakeTarget:
    """Features are the ids, after a wait; checks that nobody writes to its leased ids meanwhile."""

    devices = (CPU,)

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait

    def features(self, ids: Tensor) -> Tensor:
        before = ids.clone()
        self.wait()
        assert torch.equal(ids, before), "leased memory was given to another pass too early"
        return before[..., None].float()


class FakeTrainer:
    """Keeps what it sees."""

    device = CPU

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait, self.seen, self.steps = wait, list[tuple[int, int, int, int]](), list[tuple[int, int]]()

    def accumulate(self, item: FeatureBatch) -> None:
        self.wait()
        position = item.batch.position
        self.seen.append((position.epoch, position.step, position.index, int(item.features.sum())))

    def step(self, at: Step) -> PendingReport:
        self.steps.append((at.epoch, at.step))
        return PendingReport(at, 0.0, 4, torch.zeros(17))


def places(plan: TrainPlan, epoch: int, step: int, end: int) -> list[tuple[int, int, int]]:
    return [(p.epoch, p.step, p.index) for p, _ in plan.passes(epoch, step, end)]


def rows_in_order(plan: TrainPlan, epoch: int, step: int, end: int) -> list[int]:
    return [int(row) for _, rows in plan.passes(epoch, step, end) for row in rows]


def test_a_resume_goes_on_with_the_next_step(tokens: Path) -> None:
    plan = new_plan(tokens, pass_slots=32)
    whole = places(plan, 0, 0, 1)
    assert len(whole) > plan.steps(0)
    assert places(plan, 0, 5, 1) == [place for place in whole if place[1] >= 5]


def test_positions_are_epoch_and_step(tokens: Path) -> None:
    plan = new_plan(tokens, tokens_per_step=80)
    last = plan.steps(0)
    assert [(s.epoch, s.step) for s in islice(plan.work(0, last - 1, 2), 2)] == [(0, last - 1), (1, 0)]
    assert next(iter(plan.work(1, 5, 2))).step == 5


def test_every_row_once_and_the_rest_after_a_resume(tokens: Path) -> None:
    plan = new_plan(tokens)
    whole = rows_in_order(plan, 0, 0, 1)
    assert sorted(whole) == TokenCache.open(tokens).rows(0).tolist()
    rest = rows_in_order(new_plan(tokens), 0, 7, 1)
    assert rest == whole[-len(rest) :]


def test_later_epochs_are_whole(tokens: Path) -> None:
    plan = new_plan(tokens)
    steps = [plan.steps(epoch) for epoch in range(3)]
    by_epoch = [[s.epoch for s in plan.work(0, steps[0] - 3, 3)].count(epoch) for epoch in range(3)]
    assert by_epoch == [3, *steps[1:]]


def rows_by_step(plan: TrainPlan) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {(s.epoch, s.step): [] for s in plan.work(0, 3, 2)}
    for position, rows in plan.passes(0, 3, 2):
        found[position.epoch, position.step] += rows.tolist()
    return found


@pytest.mark.parametrize("slots", [16, 48, None])
def test_any_number_of_processes_shares_out_the_rows_of_a_step_in_passes_of_any_size(
    tokens: Path, slots: int | None
) -> None:
    whole = rows_by_step(new_plan(tokens, tokens_per_step=160))
    for ranks in (1, 2, 3, 8):
        plans = [new_plan(tokens, rank, ranks, tokens_per_step=160, pass_slots=slots) for rank in range(ranks)]
        parts = [rows_by_step(plan) for plan in plans]
        for step, rows in whole.items():
            assert sorted(row for part in parts for row in part[step]) == sorted(rows)
        for plan in plans:
            passes = [(place, rows) for place, rows in plan.passes(0, 3, 2)]
            assert [
                sum(place.step == s.step and place.epoch == s.epoch for place, _ in passes) for s in plan.work(0, 3, 2)
            ] == [s.num_passes for s in plan.work(0, 3, 2)]
            assert all(rows.size == 1 or rows.size * 16 <= (slots or 1 << 20) for _, rows in passes)


def test_orders_differ_between_epochs_and_not_between_runs(tokens: Path) -> None:
    one, other = new_plan(tokens), new_plan(tokens)
    assert rows_in_order(one, 0, 0, 1) != rows_in_order(one, 1, 0, 2)
    assert rows_in_order(one, 0, 0, 2) == rows_in_order(other, 0, 0, 2)


@pytest.fixture(params=[True, False], ids=["shared", "apart"])
def arrangement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Targets on the trainer's cores, or on devices of their own."""
    shared: bool = request.param
    monkeypatch.setattr(Pipeline, "takes_turns", lambda *_: shared)
    return shared


@pytest.mark.usefixtures("arrangement")
def test_the_trainer_sees_index_order_whatever_the_timing(tokens: Path) -> None:
    random = np.random.default_rng(0)
    pause = [float(s) for s in random.exponential(0.002, 500)]
    targets = [FakeTarget(lambda: time.sleep(pause.pop())) for _ in range(3)]
    trainer, alone = FakeTrainer(), FakeTrainer()
    Pipeline(new_plan(tokens, tokens_per_step=80, pass_slots=32), trainer, targets, ahead=3).run(
        0, 0, 2, lambda _: True
    )
    Pipeline(new_plan(tokens, tokens_per_step=80, pass_slots=32), alone, [FakeTarget()]).run(0, 0, 2, lambda _: True)
    assert trainer.seen == alone.seen == sorted(trainer.seen)
    assert trainer.steps == alone.steps


def test_leased_memory_goes_back_after_its_last_reader(tokens: Path) -> None:
    plan = new_plan(tokens)
    position, row_ids = next(plan.passes(0, 0, 1))
    batch = plan.make_batch(position, row_ids, Buffers(plan.buffer_tokens))
    calls: list[str] = []

    def features(ids: Tensor) -> Tensor:
        calls.append("read")
        return ids[..., None].float()

    item = Lane((CPU,), CPU).carry(batch, features, Stopwatch(CPU), lambda: calls.append("released"))
    assert calls == ["read", "released"]
    assert not item.batch.ids.numel(), "nobody behind the target can read it"


def test_counted_slots_are_numbered_where_the_weights_are_made(tokens: Path) -> None:
    plan = new_plan(tokens)
    for position, row_ids in islice(plan.passes(0, 0, 1), 5):
        batch = plan.make_batch(position, row_ids, Buffers(plan.buffer_tokens))
        assert 0 < batch.counted.numel() < batch.weights.numel()
        assert torch.equal(batch.counted, torch.nonzero(batch.weights.flatten()).squeeze(1))


def fail(error: BaseException) -> Callable[[], None]:
    def wait() -> None:
        raise error

    return wait


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"read", "target", "watchdog", "checkpoint"}


@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize("stage", ["read", "target", "train"])
def test_a_failure_ends_the_run_with_its_stage_and_cause(
    stage: str, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ValueError("told to fail")
    plan = new_plan(tokens)
    if stage == "read":
        monkeypatch.setattr(plan, "make_batch", lambda *_: fail(error)())
    target = FakeTarget(fail(error) if stage == "target" else lambda: None)
    trainer = FakeTrainer(fail(error) if stage == "train" else lambda: None)
    # The target that does not fail may serve a step or two before the other one's failure is seen.
    done = r"\d+" if stage == "target" else "0"
    at = f"stage {stage} failed in the run from epoch 0, step 0 on, {done} steps"
    with pytest.raises(StageFailed, match=f"{at}.*told") as caught:
        Pipeline(plan, trainer, [target, FakeTarget()]).run(0, 0, 2, lambda _: True)
    assert caught.value.__cause__ is error
    assert not threads()


@pytest.mark.usefixtures("arrangement")
def test_errors_of_this_project_come_as_they_are(tokens: Path) -> None:
    with pytest.raises(ConfigMismatch):
        Pipeline(new_plan(tokens), FakeTrainer(), [FakeTarget(fail(ConfigMismatch("no")))]).run(0, 0, 1, lambda _: True)


@pytest.mark.usefixtures("arrangement")
def test_a_stop_leaves_no_thread(tokens: Path) -> None:
    trainer = FakeTrainer()
    Pipeline(new_plan(tokens), trainer, [FakeTarget(), FakeTarget()]).run(0, 0, 3, lambda _: len(trainer.steps) < 4)
    assert trainer.steps == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert not threads()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets hung threads end after the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_hung_target_ends_the_run(tokens: Path, release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_run, "_JOIN_S", 0.1)
    monkeypatch.setattr(Pipeline, "takes_turns", lambda *_: False)  # on a device of its own
    hung = FakeTarget(release.wait)
    with pytest.raises(StageFailed, match="stage target hangs: no stage has finished anything"):
        Pipeline(new_plan(tokens), FakeTrainer(), [hung], hang_s=0.3).run(0, 0, 1, lambda _: True)


@pytest.mark.parametrize("stage", ["target", "train"])
def test_what_hangs_in_the_trainers_thread_is_a_case_for_the_last_resort(
    stage: str, tokens: Path, release: threading.Event
) -> None:
    called: list[BaseException] = []

    def last_resort(error: BaseException) -> None:  # ends the process in earnest; here it frees the trainer
        called.append(error)
        release.set()

    trainer = FakeTrainer(release.wait) if stage == "train" else FakeTrainer()
    target = FakeTarget(release.wait) if stage == "target" else FakeTarget()
    with pytest.raises(StageFailed, match=f"stage {stage} hangs"):
        Pipeline(new_plan(tokens), trainer, [target], hang_s=0.3, last_resort=last_resort).run(0, 0, 1, lambda _: True)
    assert len(called) == 1


def test_a_slow_run_is_no_hang(tokens: Path) -> None:
    trainer = FakeTrainer(lambda: time.sleep(0.1))
    Pipeline(new_plan(tokens), trainer, [FakeTarget()], hang_s=0.4).run(0, 0, 1, lambda _: len(trainer.steps) < 8)
    assert len(trainer.steps) == 8


def test_a_target_on_the_trainers_cores_computes_in_its_thread(arrangement: bool, tokens: Path) -> None:
    threads: set[int] = set()
    targets = [FakeTarget(lambda: threads.add(threading.get_ident())) for _ in range(2)]
    trainer = FakeTrainer()
    Pipeline(new_plan(tokens), trainer, targets).run(0, 0, 1, lambda _: True)
    assert len(trainer.seen) > 2
    assert (threads == {threading.get_ident()}) is arrangement


def test_times_of_every_stage_add_up_to_the_run(arrangement: bool, tokens: Path) -> None:
    # Long beside the start of threads on a busy machine.
    target, trainer = FakeTarget(lambda: time.sleep(0.015)), FakeTrainer(lambda: time.sleep(0.005))
    pipeline = Pipeline(new_plan(tokens), trainer, [target])
    start = time.perf_counter()
    pipeline.run(0, 0, 1, lambda _: True)
    wall = time.perf_counter() - start
    train = pipeline._clocks["train"][0]
    assert wall * 0.7 < train.busy + train.starved + train.blocked <= wall
    assert train.starved < 0.5 * wall if arrangement else train.blocked == 0


class Quiet(FakeTrainer):
    """Keeps nothing."""

    def accumulate(self, item: FeatureBatch) -> None:
        pass


@pytest.mark.usefixtures("arrangement")
def test_no_more_features_are_alive_than_there_is_room_for(tokens: Path) -> None:
    """Those of every stage together; before, it was the room, one a target, and two."""
    alive, most = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    class Counted(FakeTarget):
        def features(self, ids: Tensor) -> Tensor:
            nonlocal alive, most
            made = super().features(ids)
            alive += 1
            most = max(most, alive)
            weakref.finalize(made, gone)
            return made

    slow = FakeTrainer(lambda: time.sleep(0.003))
    Pipeline(new_plan(tokens), slow, [Counted() for _ in range(3)], ahead=5).run(0, 0, 1, lambda _: True)
    assert most <= 5
    assert not alive


def test_memory_is_flat_over_2000_passes(tokens: Path) -> None:
    def private_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    trainer, seen = Quiet(), list[int]()

    def on_step(report: PendingReport) -> bool:
        done = len(trainer.steps)
        if done in (400, 2000):
            seen.append(private_kib())
        return done < 2000

    Pipeline(new_plan(tokens, epochs=400), trainer, [FakeTarget()], ahead=4).run(0, 0, 400, on_step)
    # A leak of one micro-batch's ids, labels and features, 1 kB, would be 1,600 kB; what grows here is `steps`.
    assert seen[1] - seen[0] < 1024


def test_shares_of_time_name_the_bottleneck(tokens: Path) -> None:
    pipeline = Pipeline(new_plan(tokens), FakeTrainer(), [FakeTarget(lambda: time.sleep(0.005))])
    pipeline.run(0, 0, 1, lambda _: True)
    for shares in pipeline.stages().values():
        assert 0 < sum(shares.values()) <= 1.001
    assert pipeline.stages()["target"]["busy"] == max(shares["busy"] for shares in pipeline.stages().values())
    assert bottleneck(pipeline.stages()).startswith("target")
    assert "add a target device" in bottleneck(pipeline.stages())


def test_room_in_bytes_becomes_a_number_of_passes() -> None:
    assert capacity(item_bytes=1 << 30, room_bytes=8 << 30) == 8
    assert capacity(item_bytes=1 << 30, room_bytes=1 << 20, targets=3) == 5, "one in each target, one waits, one in use"
    assert capacity(item_bytes=1, room_bytes=1 << 30) == 24


def test_a_channel_is_bounded_and_closable() -> None:
    stop = Stop()
    channel: Channel[int] = Channel(1, stop)
    assert channel.put(1) == 0
    taker = threading.Timer(0.05, channel.take)
    taker.start()
    assert channel.put(2) >= 0.04, "blocked until there is room"
    channel.close()
    assert channel.take()[0] == 2
    with pytest.raises(Closed):
        channel.take()


def test_room_is_for_few_but_always_for_the_next() -> None:
    stop = Stop()
    reorder: Reorder[str] = Reorder(2, stop)
    assert [reorder.reserve(index) for index in (1, 0)] == [0, 0]
    late = threading.Thread(target=reorder.reserve, args=(2,))
    late.start()
    reorder.put(1, "b")
    reorder.put(0, "a")
    assert [reorder.take()[0] for _ in range(2)] == ["a", "b"]
    late.join(0.05)
    assert late.is_alive(), "what has been taken is in use"
    reorder.release()
    late.join()
    reorder.put(2, "c")
    assert reorder.take()[0] == "c"
    reorder.end(3)
    with pytest.raises(Closed):
        reorder.take()


def test_what_there_is_to_take_comes_before_what_others_ask_for() -> None:
    reorder: Reorder[str] = Reorder(2, Stop())
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(reorder.ask, threading.get_ident)
        while not reorder._errands:
            time.sleep(0.001)
        reorder.put(0, "a")
        assert reorder.take() == ("a", 0.0, 0.0)
        assert not asked.done()
        threading.Timer(0.05, reorder.put, (1, "b")).start()
        assert reorder.take()[0] == "b"
        assert asked.result() == threading.get_ident()


def test_work_that_is_still_asked_for_ends_with_the_run() -> None:
    stop = Stop()
    reorder: Reorder[str] = Reorder(2, stop)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(reorder.ask, lambda: 1)
        stop.stop()
        assert isinstance(asked.exception(), Closed)
