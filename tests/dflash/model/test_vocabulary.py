"""A drafter that may draft some ids only: the loss over these, drafts of all, and the same said by whole tables."""

from dataclasses import replace

import pytest
import torch
from batches import rows
from test_look_back import BASE, ends, made, micro_batch, small_tiles
from torch import Tensor

from dflash.export.written_out import written_out
from dflash.model.drafter import Drafter
from dflash.model.drafter_loss import slot_logits
from dflash.model.loss import LossKind
from dflash.training.step import forward_loss

__all__ = ["rows", "small_tiles"]
IDS = torch.tensor([1, 2, 5, 6, 7, 11, 13, 17, 20])
DSPARK = replace(BASE, kind="dspark", rank=5)


def twins() -> tuple[Drafter, Drafter]:
    """The same weights, with and without a small vocabulary."""
    whole, small = made(DSPARK, stirred=True), made(replace(DSPARK, vocabulary=IDS.numel()), stirred=True)
    assert small.vocabulary is not None
    small.vocabulary.ids.copy_(IDS)
    return whole, small


@pytest.mark.parametrize("kind", ["ce", "kl", "dspark"])
def test_loss_is_the_one_of_the_softmax_over_its_ids(kind: LossKind) -> None:
    (whole, small), given, item = twins(), ends(), micro_batch(kind)
    got = forward_loss(small, *given, item, kind)
    got.total.backward()  # type: ignore[no-untyped-call]
    batch, total, weight = item.batch, torch.zeros((), dtype=torch.float64), 0.0
    mask = torch.full(batch.labels.shape, 22)
    mask[..., 0] = batch.labels[..., 0]
    hidden = whole(item.features[..., :16], given[0](mask), batch.anchor)
    for b, a, k in batch.weights.nonzero().tolist():
        label = int(batch.labels[b, a, k])
        if label not in IDS:
            continue
        logits = slot_logits(whole, given, hidden[b, a, k][None], batch.labels[b, a, k - 1].long()[None])[0, IDS]
        place, w = int((label == IDS).nonzero()), float(batch.weights[b, a, k])
        entropy = -logits.log_softmax(0)[place]
        if kind != "ce":
            state = item.features[b, min(int(batch.anchor[b, a]) + k - 1, item.features.shape[1] - 1), 16:]
            law = given[1].logits(state)[IDS].softmax(0)
            divergence = (law * (law.log() - logits.log_softmax(0))).sum()
            distance = (logits.softmax(0) - law).abs().sum()
            entropy = divergence if kind == "kl" else 0.1 * entropy + 0.9 * distance
        total, weight = total + w * entropy, weight + w
    total.backward()  # type: ignore[no-untyped-call]
    assert 0 < weight < float(batch.weights.sum()), "some labels are out of the vocabulary"
    torch.testing.assert_close(got.total, total, rtol=1e-10, atol=0)
    torch.testing.assert_close(float(got.weight), weight, rtol=1e-6, atol=0)
    for (name, one), other in zip(small.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10, msg=name)


def drafts(drafter: Drafter, hidden: Tensor, previous: Tensor) -> Tensor:
    return slot_logits(drafter, ends(), hidden, previous)


def test_only_its_ids_are_drafted_with_the_logits_of_the_whole_head() -> None:
    whole, small = twins()
    hidden, previous = torch.randn(40, 16, dtype=torch.float64), torch.arange(40) % 23
    one, other = (drafts(drafter, hidden, previous) for drafter in (whole, small))
    assert other.isfinite().sum(1).tolist() == [IDS.numel()] * 40
    torch.testing.assert_close(other[:, IDS], one[:, IDS], rtol=1e-12, atol=1e-12)


def test_tables_of_the_whole_vocabulary_say_it_too() -> None:
    _, small = twins()
    embedding, head = ends()
    served = written_out(small.float(), (embedding.float(), head.to(torch.float32)))
    assert served.vocabulary is None
    assert served.shape.rank == 6
    hidden, previous = torch.randn(200, 16), torch.arange(200) % 23
    given = (embedding.float(), head.to(torch.float32))
    for halved in (False, True):
        if halved:  # as a server holds it
            served = served.half().float()
        found = slot_logits(served, given, hidden, previous).argmax(-1)
        assert torch.isin(found, IDS).all()
        if not halved:
            assert torch.equal(found, slot_logits(small, given, hidden, previous).argmax(-1))
