"""Parts that look back: numbers worked out by hand, dense float64 references, a start that is plain DFlash."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import SHAPE, rows
from torch import Tensor, nn

import dflash.model.loss
from dflash.model.candidates import Candidates
from dflash.model.convolution import Convolution
from dflash.model.drafter import Drafter
from dflash.model.drafter_loss import slot_logits
from dflash.model.head import Head
from dflash.model.look_back import Ends, Slots
from dflash.model.loss import NEEDS_STATES, LossKind
from dflash.model.markov import MarkovHead
from dflash.model.part import Part
from dflash.model.selector import CandidateSelector
from dflash.model.shape import DrafterShape
from dflash.training.step import forward_loss

BASE = replace(SHAPE, hidden_size=16, num_heads=2, head_dim=8, vocab_size=23, mask_token_id=22)
PARTS: dict[str, dict[str, Any]] = {
    "convolutions": {"kind": "dflash2"},
    "dflash2": {"kind": "dflash2", "rank": 5, "candidates": 4},
    "dflash2 free": {"kind": "dflash2", "rank": 5, "candidates": 4, "tables": "free"},
    "dspark": {"kind": "dspark", "rank": 5, "confidence": True},
    "dspark gated": {"kind": "dspark", "rank": 5, "markov": "gated"},
    "dspark free": {"kind": "dspark", "rank": 5, "tables": "free", "confidence": True},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash.model.loss, "_TILE", {"cpu": (4, 5)})


def made(shape: DrafterShape, *, stirred: bool) -> Drafter:
    """The same plain weights for every kind; parts as they start, or random in all they have."""
    drafter = Drafter(shape).double()
    generator, later = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    parts = [module for module in drafter.modules() if isinstance(module, Part)]
    own = {parameter for part in parts for parameter in part.parameters()}
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter not in own:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.1)
        for part in parts:
            part.start(later)
            for parameter in part.parameters() if stirred else ():
                parameter += torch.randn(parameter.shape, generator=later, dtype=torch.float64) * 0.3
    return drafter


def ends(**changes: Any) -> tuple[nn.Module, Head]:
    generator = torch.Generator().manual_seed(2)
    embedding = nn.Embedding(23, 16, dtype=torch.float64).requires_grad_(False)
    embedding.weight.copy_(torch.randn(23, 16, generator=generator, dtype=torch.float64))
    return embedding, Head(torch.randn(23, 16, generator=generator, dtype=torch.float64), **changes)


def micro_batch(kind: LossKind = "ce") -> Any:
    item = rows(2, seed=3)
    generator = torch.Generator().manual_seed(4)
    width = 32 if kind in NEEDS_STATES else 16
    features = torch.randn(2, 12, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 22, item.batch.labels.shape, generator=generator, dtype=torch.int32)
    return replace(item, features=features, batch=replace(item.batch, labels=labels, weights=item.batch.weights * 0.7))


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_kind_starts_as_plain_dflash_bit_for_bit(parts: dict[str, Any]) -> None:
    plain, other = made(BASE, stirred=False), made(replace(BASE, **parts), stirred=False)
    item, given = micro_batch(), ends()
    losses = [forward_loss(drafter, *given, item, "ce", 0.0) for drafter in (plain, other)]
    for loss in losses:
        loss.total.backward()  # type: ignore[no-untyped-call]
    wider = parts.get("kind") == "dspark" and parts.get("tables") == "free"  # its product rounds in another order
    if wider:
        torch.testing.assert_close(losses[0].total, losses[1].total, rtol=1e-14, atol=0)
    else:
        assert torch.equal(losses[0].total, losses[1].total)
    grads = dict(other.named_parameters())
    for name, parameter in plain.named_parameters():
        if wider:
            torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=0, atol=1e-13)
        else:
            assert torch.equal(parameter.grad, grads[name].grad), name
    embedded = given[0](item.batch.labels.long())
    hidden = [drafter(item.features, embedded, item.batch.anchor) for drafter in (plain, other)]
    assert torch.equal(*hidden)
    for weighted in (0.0, 1.0):  # and then its own parts move
        other.zero_grad()
        forward_loss(other, *given, item, "ce", weighted).total.backward()  # type: ignore[no-untyped-call]
    moved = {name.split(".")[0] for name, p in grads.items() if p.grad is not None and p.grad.any()}
    assert other.look_back is None or other.look_back.name in moved


def dense(drafter: Drafter, given: tuple[nn.Module, Head], item: Any, kind: LossKind, alpha: float) -> Tensor:
    """Σ w·loss the obvious way: whole logits, whole softmaxes, loops over slots, autograd."""
    batch, (embedding, head) = item.batch, given
    mask = torch.full(batch.labels.shape, 22)
    mask[..., 0] = batch.labels[..., 0]
    hidden = drafter(item.features[..., :16], embedding(mask), batch.anchor)
    part, total = drafter.look_back, torch.zeros((), dtype=torch.float64)
    for b, a, k in batch.weights.nonzero().tolist():
        state, label, weight = hidden[b, a, k], int(batch.labels[b, a, k]), float(batch.weights[b, a, k])
        previous = batch.labels[b, a, k - 1].long()
        logits = head.logits(state)
        scores, read = logits, torch.zeros(0)
        if part is not None:
            read = part.read(previous, embedding)
            if part.free:
                bonus = part.tables()[1] @ part.meet(state, read)
            else:
                bonus = head.scale * head.weight @ (drafter.norm.weight * part.after(part.meet(state, read)))
            scores = logits + bonus
        if isinstance(part, CandidateSelector):
            ids = sorted(sorted(range(23), key=lambda v: (-float(logits.detach()[v]), v))[:4])
            if label in ids:
                total = total - alpha * weight * scores[ids].log_softmax(0)[ids.index(label)]
            scores = logits
        law = scores.log_softmax(0)
        ce = -law[label]
        if kind == "ce":
            total = total + weight * ce
            continue
        position = min(max(int(batch.anchor[b, a]) + k - 1, 0), 11)
        wanted = head.logits(item.features[b, position, 16:]).log_softmax(0)
        distance = (law.exp() - wanted.exp()).abs().sum()
        total = total + weight * ((wanted.exp() * (wanted - law)).sum() if kind == "kl" else 0.1 * ce + 0.9 * distance)
        if kind == "dspark" and drafter.confidence_head is not None:
            guess = drafter.confidence_head(state, read)
            total = total + weight * F.binary_cross_entropy_with_logits(guess, 1 - distance.detach() / 2)
    return total


@pytest.mark.parametrize("kind", ["ce", "kl", "dspark"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_losses_and_gradients_equal_a_dense_reference(parts: dict[str, Any], kind: LossKind) -> None:
    drafter, item, given = made(replace(BASE, **parts), stirred=True), micro_batch(kind), ends(scale=0.6)
    got = forward_loss(drafter, *given, item, kind, 0.4).total
    want = dense(drafter, given, item, kind, 0.4)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    parameters = dict(drafter.named_parameters())
    ours, theirs = (torch.autograd.grad(x, list(parameters.values()), allow_unused=True) for x in (got, want))
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_selectors_gradient_passes_gradcheck_with_a_softcap(softcap: float | None) -> None:
    drafter = made(replace(BASE, kind="dflash2", rank=5, candidates=4, tables="free"), stirred=True)
    part, item, given = drafter.look_back, micro_batch(), ends(softcap=softcap)
    assert part is not None
    slots = Slots(item.batch.labels, item.batch.weights, "ce", None, item.batch.counted, 0.5)
    generator = torch.Generator().manual_seed(0)
    hidden, read = (
        torch.randn(2, 3, 4, width, generator=generator, dtype=torch.float64, requires_grad=True) for width in (16, 5)
    )
    table = part.get_parameter("successor_codebook")

    def total(h: Tensor, r: Tensor, _: Tensor) -> Tensor:
        return part.loss(h, r, Ends(*given, drafter.norm.weight), slots).total

    assert torch.autograd.gradcheck(total, (hidden, read, table), fast_mode=True)  # along random directions


def test_convolution_worked_out_by_hand() -> None:
    convolution = Convolution(replace(BASE, hidden_size=16)).double()
    convolution.start(torch.Generator())
    # One group of 16 channels; only the first two are not zero, so the rest of the group adds nothing.
    with torch.no_grad():
        for row, weights in enumerate(((0.1, 0), (0, 0.1), (0, 0), (0.1, 0.1))):
            convolution.kernel_projection.weight[row, :2] = torch.tensor(weights, dtype=torch.float64)
    n = torch.zeros(3, 16, dtype=torch.float64)
    n[:, :2] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    seen: list[Tensor] = []
    out = convolution(n, lambda y: seen.append(y) or y)  # type: ignore[func-returns-value]
    expected = torch.tensor([[1.1, 2.2], [4.3, 6.0], [9.3, 11.4]], dtype=torch.float64)
    torch.testing.assert_close(seen[0][:, :2], expected)
    expected = torch.tensor([[1.1, 2.2], [5.07, 7.54], [14.03, 18.0]], dtype=torch.float64)
    torch.testing.assert_close(out[:, :2], expected)
    later = n.clone()
    later[2] += 1
    assert torch.equal(convolution(later, lambda y: y)[:2], convolution(n, lambda y: y)[:2]), "no slot sees a later one"


@pytest.mark.parametrize(("label", "ce"), [(3, 1.463282), (7, 0.0)])
def test_selector_worked_out_by_hand(label: int, ce: float) -> None:
    shape = replace(BASE, hidden_size=2, rank=2, candidates=2, kind="dflash2", tables="free", vocab_size=8)
    part = CandidateSelector(shape).double()
    hidden = torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64, requires_grad=True)
    read = torch.tensor([[[[1.0, -1.0]]]], dtype=torch.float64, requires_grad=True)
    # Logits (…, 1.0, .8, …) at ids 2 and 3: rows of the head that see the first channel alone.
    weight = torch.full((8, 2), 0.0, dtype=torch.float64)
    weight[:, 0] = torch.tensor([-1.0, -1, 1.0, 0.8, -1, -1, -1, -1])
    with torch.no_grad():
        part.hidden_projection.weight.copy_(torch.eye(2))
        part.successor_codebook.zero_()
        part.successor_codebook[2, 0], part.successor_codebook[3, 1] = 0.5, 0.25
    ones, norm = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    both = []
    for alpha in (0.0, 1.0):
        slots = Slots(torch.full((1, 1, 1), label), ones, "ce", None, torch.tensor([0]), alpha)
        both.append(part.loss(hidden, read, Ends(nn.Identity(), Head(weight), norm), slots).total)
    own = both[1] - both[0]
    assert float(own.detach()) == pytest.approx(ce, abs=1e-6)
    grads = torch.autograd.grad(own, [part.successor_codebook, read, part.hidden_projection.weight, hidden])
    if label == 7:
        assert not any(grad.any() for grad in grads)
        return
    e = 0.768525
    expected_b = [[0.0, 0.0]] * 2 + [[e, -2 * e], [-e, 2 * e]] + [[0.0, 0.0]] * 4
    torch.testing.assert_close(grads[0].tolist(), expected_b, atol=1e-6, rtol=0)
    torch.testing.assert_close(grads[1].flatten().tolist(), [0.384262, -0.384262], atol=1e-6, rtol=0)
    torch.testing.assert_close(grads[2].tolist(), [[0.384262, 0.768525], [0.192131, 0.384262]], atol=1e-6, rtol=0)
    through_u = e * (1.0 - 0.8)  # Σ e·W over the two candidates, first channel
    torch.testing.assert_close(grads[3].flatten().tolist(), [0.384262 + through_u, 0.192131], atol=1e-6, rtol=0)


def test_dspark_worked_out_by_hand() -> None:
    """Two tokens. h = 0, W2·m = (ln 3, 0): q = (¾, ¼). The target says p = (½, ½), the label is 1.

    CE = ln 4, Σ|q − p| = ½; s = (1, −1), Σ q·s = ½; ∂loss/∂z₀ = 0.1·¾ + 0.9·¾·(1 − ½) = 0.4125 = −∂loss/∂z₁.
    An untrained confidence head says ½, and should say ¾: BCE = ln 2, ∂BCE/∂bias = ½ − ¾.
    """
    shape = replace(BASE, hidden_size=2, rank=1, kind="dspark", tables="free", vocab_size=2, confidence=True)
    part = MarkovHead(shape).double()
    with torch.no_grad():
        part.markov_w2.weight.copy_(torch.tensor([[3.0], [1.0]], dtype=torch.float64).log())
    hidden = torch.zeros(1, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    read = torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    ones, head = torch.ones(1, 1, 1, dtype=torch.float64), Head(torch.eye(2, dtype=torch.float64))
    slots = Slots(torch.ones(1, 1, 1, dtype=torch.long), ones, "dspark", hidden.detach(), torch.tensor([0]), 0.0)
    loss = part.loss(hidden, read, Ends(nn.Identity(), head, ones.flatten()), slots)
    assert float(loss.total) == pytest.approx(0.1 * 1.3862944 + 0.9 * 0.5, abs=1e-7)
    assert loss.distance is not None
    assert float(loss.distance) == pytest.approx(0.5)
    grads = torch.autograd.grad(loss.total, [hidden, read, part.markov_w2.weight])
    assert grads[0].flatten().tolist() == pytest.approx([0.4125, -0.4125])
    assert grads[1].item() == pytest.approx(0.4125 * 1.0986123)
    assert grads[2].flatten().tolist() == pytest.approx([0.4125, -0.4125])


@pytest.mark.parametrize("columns", [3, 16, 100])
def test_candidates_are_the_first_of_the_largest_over_any_cut(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 6, (50, 100), generator=generator).float()  # ties everywhere
    logits[:, 40:60] = -torch.inf
    logits[0] = -torch.inf
    best = Candidates(16)
    for start in range(0, 100, columns):
        best.add(logits[:, start : start + columns], start)
    values, ids = best.by_id()
    for row in range(50):
        expected = sorted(range(100), key=lambda v: (-float(logits[row, v]), v))[:16]
        assert ids[row].tolist() == sorted(expected)
        assert torch.equal(values[row], logits[row, ids[row]])


@pytest.mark.parametrize("parts", [p for p in PARTS.values() if p.get("rank") and p.get("tables") != "free"])
def test_tables_written_out_give_the_same_logits(parts: dict[str, Any]) -> None:
    shape = replace(BASE, **parts)
    frozen, given = made(shape, stirred=True), ends(scale=0.6)
    assert frozen.look_back is not None
    free = made(shape.published(), stirred=False)
    first, second = frozen.look_back.written_out(Ends(*given, frozen.norm.weight))
    kept = {
        name: value for name, value in frozen.state_dict().items() if ".before." not in name and ".after." not in name
    }
    free.load_state_dict(kept, strict=False)
    assert free.look_back is not None
    with torch.no_grad():
        for table, value in zip(free.look_back.tables(), (first, second), strict=True):
            table.copy_(value)
        hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        previous = torch.arange(9) % 23
        a, b = (slot_logits(one, given, hidden, previous) for one in (frozen, free))
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # the tables are float32
