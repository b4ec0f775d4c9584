"""The optimizer step: what a step divides by, what it skips, what it keeps in float32, and its learning rate."""

from typing import Any

import pytest
import torch
from batches import at, join, new_trainer, rows, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

import dflash.training.step
from dflash.model import loss as loss_module
from dflash.model.head import Head
from dflash.model.loss import BlockLoss, LossKind, block_loss
from dflash.training.schedule import learning_rate, progress


def summed(loss: float, slots: int, trainer: Any) -> BlockLoss:
    """A micro-batch of so many counted slots with this loss each."""
    total = trainer.drafter.fc.weight.sum() * 0 + loss * slots
    by_slot = torch.tensor([0.0, slots, 0.0, 0.0])
    return BlockLoss(total, torch.tensor(float(slots)), by_slot * 0, by_slot)


def test_tokens_weigh_alike_whatever_their_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    for loss, slots in ((4.0, 1), (1.0, 3)):
        monkeypatch.setattr(
            dflash.training.step, "forward_loss", lambda *_, mean=loss, n=slots: summed(mean, n, trainer)
        )
        trainer.accumulate(rows(1))
    report = trainer.step(at()).report()
    assert report.loss == 1.75  # a mean of means is 2.5
    assert sum(report.counted_by_slot) == 4


def test_gradients_equal_those_of_the_undivided_batch() -> None:
    first, second = rows(1, seed=1, supervised=0.2), rows(3, seed=2)
    divided, whole = new_trainer(dtype=torch.float32), new_trainer(dtype=torch.float32)
    divided.accumulate(first)
    divided.accumulate(second)
    whole.accumulate(join(first, second))
    assert divided._gradient.abs().max() > 1e-3
    torch.testing.assert_close(divided._gradient, whole._gradient, rtol=1e-6, atol=1e-6)
    assert divided.step(at()).report().loss == pytest.approx(whole.step(at()).report().loss, rel=1e-6)


def test_the_optimizer_sees_the_gradient_of_the_mean() -> None:
    trainer, items = new_trainer(), [rows(1, seed=1), rows(2, seed=2)]
    for item in items:
        trainer.accumulate(item)
    summed_gradient, weight = trainer._gradient.clone(), sum(float(i.batch.weights.sum()) for i in items)
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(trainer._gradient.clone()))
    trainer.step(at())
    torch.testing.assert_close(seen[0], summed_gradient / weight, rtol=1e-12, atol=0)


def test_a_step_without_supervised_tokens_is_skipped_and_says_so() -> None:
    trainer = new_trainer()
    before = weights_of(trainer)
    trainer.accumulate(rows(2, supervised=0.0))
    report = trainer.step(at()).report()
    assert report.skipped
    assert sum(report.counted_by_slot) == 0
    assert report.loss != report.loss, "no loss is reported: neither 0 nor the last one"
    assert torch.equal(weights_of(trainer), before)


def test_a_masked_row_leaves_no_trace() -> None:
    """Also not AdamW's decay: sum/max(count, 1) gives gradient 0, and 1.0 would shrink to 0.99."""
    with_masked, without = (new_trainer(lr=0.1, weight_decay=0.1) for _ in range(2))
    for seed, trainers in ((1, (with_masked, without)), (None, (with_masked,)), (2, (with_masked, without))):
        for trainer in trainers:
            trainer.accumulate(rows(1, seed=seed) if seed else rows(1, supervised=0.0))
            trainer.step(at())
    assert torch.isfinite(weights_of(with_masked)).all()
    assert torch.equal(weights_of(with_masked), weights_of(without))
    left, right = with_masked.optimizer_tensors(), without.optimizer_tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_steps_change_nothing(bad: float) -> None:
    trainer, good = new_trainer(), rows(2)
    trainer.accumulate(good)
    trainer.step(at(0))
    before, moments = weights_of(trainer), {k: v.clone() for k, v in trainer.optimizer_tensors().items()}
    poisoned = rows(2, seed=3)
    poisoned.features[0, 0, 0] = bad
    trainer.accumulate(poisoned)
    assert trainer.step(at(1)).report().skipped
    assert torch.equal(weights_of(trainer), before)
    assert all(torch.equal(value, moments[name]) for name, value in trainer.optimizer_tensors().items())
    trainer.accumulate(good)
    assert not trainer.step(at(2)).report().skipped, "the poisoned step leaves nothing in the sums"


def test_the_schedule_counts_optimizer_steps() -> None:
    """100 micro-batches, G = 4: 25 steps. Linear to 0 there; here half a cosine, so its own value after 10 steps."""
    trainer = new_trainer(lr=1.0, min_lr=0.0)
    rates = []
    for step in range(25):
        for _ in range(4):
            trainer.accumulate(rows(1))
        rates.append(trainer.step(at(step, of=25)).report().lr)
    assert rates[10] == pytest.approx(0.5 * (1 + torch.cos(torch.tensor(torch.pi * 10.5 / 25)).item()))
    assert rates == sorted(rates, reverse=True)


def test_past_the_plan_the_rate_stays_at_its_floor() -> None:
    rates = [learning_rate(progress(0, step, 8, 1), peak=1.0, floor=0.1, warmup=0.0) for step in range(10)]
    assert rates[8:] == [0.1, 0.1]
    assert min(rates) == 0.1


def test_the_rate_depends_on_the_position_alone() -> None:
    def rate(epoch: int, step: int) -> float:
        return learning_rate(progress(epoch, step, 5, 2), peak=1.0, floor=0.0, warmup=0.2)

    whole = [rate(epoch, step) for epoch in range(2) for step in range(5)]
    assert [rate(1, step) for step in range(5)] == whole[5:]  # a resume: no warm-up again
    assert whole.index(max(whole)) == 2
    assert min(whole) > 0, "no step learns nothing, the first and the last one included"


@pytest.mark.parametrize("steps", [4, 5, 50])
def test_the_mean_rate_is_the_schedules_however_many_steps_there_are(steps: int) -> None:
    rates = [learning_rate(progress(0, step, steps, 1), peak=1.0, floor=0.0, warmup=0.2) for step in range(steps)]
    # ∫ = 0.2 / 2 + 0.8 / 2; the middle of a step is off where the warm-up ends inside it, by 1/8 of a step at most.
    assert sum(rates) / steps == pytest.approx(0.5, abs=1 / (8 * steps))


def test_the_drafter_stays_in_training_mode() -> None:
    trainer = new_trainer()
    trainer.accumulate(rows(1))
    trainer.step(at())
    assert trainer.drafter.training


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device: values that Python reads, shapes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, f"{func} reads a value"
        assert torch.Tag.dynamic_output_shape not in func.tags, f"{func} makes a shape of values"
        return func(*args, **kwargs or {})


def test_a_step_never_waits_for_its_device() -> None:
    trainer = new_trainer(weight_decay=0.1)
    for step in range(2):
        trainer.accumulate(rows(2))
        with NoSync():
            trainer.step(at(step))
    with pytest.raises(AssertionError, match="reads a value"), NoSync():
        trainer.drafter.fc.weight.sum().item()


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_the_loss_never_waits_for_its_device(kind: LossKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's device without values, which refuses whatever needs one; a GPU would have to be waited for."""
    monkeypatch.setitem(loss_module._TILE, "meta", loss_module._TILE["cuda"])
    with torch.device("meta"):
        hidden, weights = torch.zeros(2, 3, 4, 8, requires_grad=True), torch.zeros(2, 3, 4)
        head, labels = Head(torch.zeros(16, 8)), torch.zeros(2, 3, 4, dtype=torch.int32)
        states = torch.zeros_like(hidden) if kind == "kl" else None
        counted = torch.zeros(9, dtype=torch.long)
        block_loss(hidden, head, labels, weights, kind, states, counted).total.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(NotImplementedError):
            block_loss(hidden, head, labels, weights, kind, states)


def test_small_updates_add_up_in_float32() -> None:
    """A norm weight of 1.0 in bf16 would not move by 6e-4; weights, moments and what is saved are float32."""
    trainer = new_trainer(dtype=torch.float32, lr=6e-4, min_lr=6e-4)
    weight = trainer.parameters["hidden_norm.weight"]
    start = weight.detach().clone()
    for step in range(1000):
        trainer._gradient.fill_(1.0)
        trainer._sums["weight"].fill_(1.0)
        trainer.step(at(step, of=1000))
    torch.testing.assert_close(start - weight, torch.full_like(weight, 0.6), rtol=1e-3, atol=0)
    assert all(value.dtype == torch.float32 for value in trainer.optimizer_tensors().values())


def test_optimizer_tensors_go_on_where_they_were() -> None:
    one, other = new_trainer(), new_trainer()
    for seed in range(3):
        one.accumulate(rows(2, seed=seed))
        one.step(at(seed))
    other.drafter.load_state_dict(one.drafter.state_dict())
    other.load_optimizer_tensors({name: value.clone() for name, value in one.optimizer_tensors().items()})
    for trainer in (one, other):
        trainer.accumulate(rows(2, seed=9))
        trainer.step(at(3))
    assert torch.equal(weights_of(one), weights_of(other))


def test_clipping_shortens_the_gradient_of_the_whole_step() -> None:
    trainer = new_trainer(clip=0.01)
    trainer.accumulate(rows(2))
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(trainer._gradient.norm().item()))
    report = trainer.step(at()).report()
    assert report.grad_norm > 0.01
    assert seen == [pytest.approx(0.01, rel=1e-3)]
