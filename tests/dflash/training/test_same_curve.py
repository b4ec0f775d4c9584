"""The curve is the same on any number of processes and with passes of any size: only the last digits may move."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import SHAPE, config, weights_of
from torch import Tensor, nn

from cache.batches.gather import Buffers
from cache.disk.store import TokenCache
from dflash.batch import FeatureBatch
from dflash.config import DrafterConfig, RunConfig, TargetConfig
from dflash.model.drafter import Drafter
from dflash.model.head import Head
from dflash.pipeline.train_plan import TrainPlan
from dflash.training.step import Trainer

VOCABULARY = 61


def curve(tokens: Path, processes: int, pass_slots: int | None, **changes: Any) -> tuple[Tensor, list[float], int]:
    """Weights, losses and passes of one epoch in float64. Sums do not care which process adds to them."""
    training = config(tokens_per_step=200, anchors=6, pass_slots=pass_slots, **changes)
    settings = RunConfig(target=TargetConfig(model="-"), drafter=DrafterConfig(block_size=4), training=training)
    store = TokenCache.open(tokens)
    plans = [TrainPlan(store, settings, rank, processes) for rank in range(processes)]
    torch.manual_seed(0)
    drafter = Drafter(replace(SHAPE, vocab_size=VOCABULARY, mask_token_id=60)).double()
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.3)
    embedding = nn.Embedding(VOCABULARY, 8, dtype=torch.float64).requires_grad_(False)
    features = torch.randn(VOCABULARY, 8).bfloat16()
    trainer = Trainer(drafter, embedding, Head(torch.randn(VOCABULARY, 8, dtype=torch.float64)), training)
    losses, passes = [], 0
    for at in plans[0].work(0, 0, 1):
        for plan in plans:
            for position, rows in plan.passes(at.epoch, at.step, at.epoch + 1):
                if position.step > at.step:
                    break
                batch = plan.make_batch(position, rows, Buffers(plan.buffer_tokens))
                trainer.accumulate(FeatureBatch(batch, features[batch.ids.long()]))
                passes += 1
        losses.append(trainer.step(at).report().loss)
    return weights_of(trainer), losses, passes


@pytest.fixture(scope="module")
def whole(tokens: Path) -> tuple[Tensor, list[float], int]:
    return curve(tokens, 1, None)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("pass_slots", [24, 96, None])
def test_processes_and_passes_change_no_curve(
    processes: int, pass_slots: int | None, tokens: Path, whole: tuple[Tensor, list[float], int]
) -> None:
    weights, losses, passes = curve(tokens, processes, pass_slots)
    assert (weights - whole[0]).abs().max() <= 1e-10
    assert losses == pytest.approx(whole[1], abs=1e-10)
    assert passes >= len(losses) * processes
    assert pass_slots is None or passes > 2 * whole[2]


def test_other_rows_are_another_curve(tokens: Path, whole: tuple[Tensor, list[float], int]) -> None:
    assert (curve(tokens, 1, None, seed=1)[0] - whole[0]).abs().max() > 1e-4
