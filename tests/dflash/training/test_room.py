"""Passes that fit: what one keeps is measured, and halved where memory ends. Layouts of a machine that is not here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from batches import SHAPE, config, new_trainer
from torch import Tensor

from cache.batches.gather import Buffers
from cache.batches.passes import PassRoom
from cache.disk.store import TokenCache
from dflash.batch import FeatureBatch
from dflash.config import DrafterConfig, RunConfig, TargetConfig
from dflash.errors import ConfigMismatch
from dflash.pipeline.train_plan import MOST, TrainPlan
from dflash.training.assumed import Assumed, assumed
from dflash.training.gpu_layouts import layouts, table
from dflash.training.room import estimated_bytes, fit_room, largest_pass, room_for, saved_bytes
from dflash.training.step import Trainer

QWEN3_8B = replace(
    SHAPE, hidden_size=4096, intermediate_size=12288, num_heads=32, num_key_value_heads=8, head_dim=128, num_layers=5,
    block_size=16, taps=(1, 9, 17, 25, 33), num_target_layers=36, vocab_size=151_936,
)  # fmt: skip


class FakeTarget:
    """One feature a token, random and the same for the same token."""

    devices = (torch.device("cpu"),)

    def features(self, ids: Tensor) -> Tensor:
        return torch.randn(61, 8, generator=torch.Generator().manual_seed(0)).bfloat16()[ids.long()]


def new_plan(tokens: Path, **training: Any) -> TrainPlan:
    settings = config(tokens_per_step=200, anchors=6, **training)
    store = TokenCache.open(tokens)
    return TrainPlan(
        store, RunConfig(target=TargetConfig(model="-"), drafter=DrafterConfig(block_size=4), training=settings)
    )


def trainer_of_61() -> Trainer:
    """A trainer whose embedding and head know the ids of the tiny rows."""
    trainer = new_trainer(dtype=torch.float32)
    trainer.embedding = torch.nn.Embedding(61, 8).requires_grad_(False)
    trainer.head = type(trainer.head)(torch.randn(61, 8))
    return trainer


def test_what_a_pass_keeps_is_foretold_from_a_larger_and_a_smaller_one(tokens: Path) -> None:
    plan, trainer = new_plan(tokens), trainer_of_61()
    _, measured = fit_room(plan, FakeTarget(), trainer)  # type: ignore[arg-type]
    assert measured is not None
    assert trainer._gradient.abs().max() == 0, "it leaves no trace"
    for position, rows in list(plan.passes(0, 0, 1))[:4]:
        batch = plan.make_batch(position, rows, Buffers(plan.buffer_tokens))
        made = FeatureBatch(batch, FakeTarget().features(batch.ids))
        kept = saved_bytes(lambda made=made: trainer.accumulate(made), trainer.parameters.values())
        assert measured.of(batch.padded, batch.padded_slots) == pytest.approx(kept, rel=0.1)


def test_a_pass_is_as_large_as_its_device_and_no_larger_than_helps(tokens: Path) -> None:
    kept = estimated_bytes(QWEN3_8B)
    assert 0.65e6 < kept.slot < 0.75e6
    assert room_for(kept, 1e12) == MOST
    assert room_for(kept, 45e9) == PassRoom(MOST.tokens // 2, MOST.slots // 2)
    assert room_for(kept, 1e6) is None
    plan = new_plan(tokens)
    room, measured = fit_room(plan, FakeTarget(), trainer_of_61(), available=lambda: 2.0e7)  # type: ignore[arg-type]
    assert measured is not None
    assert measured.of(room.tokens, room.slots) <= 2.0e7 < measured.of(2 * room.tokens, 2 * room.slots)
    with pytest.raises(torch.OutOfMemoryError, match="not even a pass"):
        fit_room(new_plan(tokens), FakeTarget(), trainer_of_61(), available=lambda: 1.0)  # type: ignore[arg-type]


def test_a_pass_that_does_not_fit_is_halved_and_says_so(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan, trainer = new_plan(tokens), trainer_of_61()
    whole = largest_pass(plan)
    assert whole is not None
    accumulate, limit = Trainer.accumulate, MOST.slots // 4

    def small(self: Trainer, made: FeatureBatch) -> None:
        if plan.room.slots > limit:
            raise torch.OutOfMemoryError("told to")
        accumulate(self, made)

    monkeypatch.setattr(Trainer, "accumulate", small)
    room, _ = fit_room(plan, FakeTarget(), trainer)  # type: ignore[arg-type]
    assert room == PassRoom(MOST.tokens // 4, limit)
    assert [record.args for record in caplog.records] == [(MOST.slots // 2,), (limit,)]


def test_a_size_that_was_asked_for_is_not_measured(tokens: Path) -> None:
    plan = new_plan(tokens, pass_slots=96)
    assert fit_room(plan, None, None) == (PassRoom(MOST.tokens, 96), None)  # type: ignore[arg-type]


def too_large() -> None:
    from dflash.training.step import Trainer

    def accumulate(self: Trainer, made: FeatureBatch) -> None:
        raise torch.OutOfMemoryError("tried to allocate 99 GB")

    Trainer.accumulate = accumulate  # type: ignore[method-assign]


def test_a_run_that_fits_no_pass_is_refused_with_numbers(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("large")
    tiny.run(["check", run, "--tokens", tokens], run / "log", before=too_large)
    plan = json.loads((run / "plan.json").read_text())
    assert not plan["fits"]
    assert "a pass of 1,024 slots keeps about" in plan["refusals"][0]
    assert "99 GB" in plan["refusals"][0]


def test_layouts_of_a_drafter_that_costs_three_times_the_target() -> None:
    found = layouts(8, target_s=1.0, drafter_s=3.0)
    assert (found[0].processes, found[0].together, found[0].seconds) == (8, True, 0.5)
    assert found[0].target_idle == found[0].drafter_idle == 0
    last = next(one for one in found if one.processes == 1 and not one.together)
    assert (last.targets, last.seconds) == (7, 3.0)
    assert last.target_idle == pytest.approx(1 - 1 / 21)
    assert "the next best takes" in table(found)
    slow_target = layouts(4, target_s=0.480, drafter_s=0.150)
    assert slow_target[0].seconds == pytest.approx(0.1575)


def test_a_machine_is_assumed_without_weights(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("assumed")
    for gpus in (1, 4, 8):
        said = assumed(run, tokens, Assumed.parse(f"gpus={gpus},memory_gb=80,target_us=1,drafter_us=2,rows=1000000"))
        assert "given" in said
        assert "(estimated)" in said
        assert f"training.processes={gpus}" in said
    with pytest.raises(ConfigMismatch, match="names of gpus, memory_gb"):
        Assumed.parse("cpus=8")
