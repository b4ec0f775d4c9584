"""What is run before the first step: every shape that would be compiled, without a trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash.batch import FeatureBatch
from dflash.training.initial_drafter import new_drafter
from dflash.training.open_run import open_run
from dflash.training.replicas import weights_sum
from dflash.training.step import Trainer
from dflash.training.warm_up import warm_up


@pytest.mark.parametrize("evaluates", [False, True])
def test_one_row_and_several_with_gradients_and_without(
    evaluates: bool, make_run: Callable[..., Path], tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_run(make_run("warm"), tokens)
    target = opened.load_target((torch.device("cpu"),))
    drafter = new_drafter(opened.shape, opened.config.drafter, target, 0)
    trainer = Trainer(drafter, *target.ends(torch.device("cpu")), opened.config.training)
    before, seen = weights_sum(trainer.parameters.values()), []
    accumulate = trainer.accumulate

    def noted(item: FeatureBatch) -> None:
        seen.append((item.batch.anchor.shape[0], torch.is_grad_enabled()))
        assert item.batch.slots > 0
        accumulate(item)

    monkeypatch.setattr(trainer, "accumulate", noted)
    warm_up(opened.plan(), target, trainer, evaluates=evaluates)
    assert set(seen) == {(rows, grad) for rows in (1, 2) for grad in ((True, False) if evaluates else (True,))}
    assert weights_sum(trainer.parameters.values()) == before
    assert not any(p.grad.any() for p in trainer.parameters.values() if p.grad is not None)
    assert not trainer._sums.vector.any()
    assert not trainer.optimizer.state


def test_any_weight_that_changes_by_a_bit_changes_the_sum() -> None:
    weights = [torch.randn(5, 3), torch.randn(4, dtype=torch.float64), torch.randn(6).bfloat16()]
    before = weights_sum(weights)
    assert weights_sum(weight.clone() for weight in weights) == before
    for weight, bits in zip(weights, (torch.int32, torch.int64, torch.int16), strict=True):
        weight.view(bits).flatten()[-1] ^= 1
        assert weights_sum(weights) != before
        weight.view(bits).flatten()[-1] ^= 1
    assert weights_sum([weights[0][:, :1].contiguous(), *weights[1:]]) != before
