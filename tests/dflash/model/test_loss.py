"""Losses against slot-by-slot references, forward and backward, over any cut into tiles; what gets a gradient."""

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dflash.model.loss
from dflash.model.head import Head
from dflash.model.loss import BlockLoss, LossKind, block_loss, dpace_weights, label_states

B, A, K, H, V = 2, 3, 4, 5, 11


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, the last of each not full."""
    monkeypatch.setattr(dflash.model.loss, "_TILE", {"cpu": (4, 3)})


def heads() -> dict[str, Head]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    return {
        "plain": Head(weight),
        "bias": Head(weight, bias),
        "scale": Head(weight, scale=0.25),
        "softcap": Head(weight, softcap=2.0),
        "all": Head(weight, bias, softcap=1.5, scale=3.0),
    }


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, labels, weights (some 0) and the target's states."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, A, K, H, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (B, A, K), generator=generator)
    weights = torch.rand(B, A, K, generator=generator, dtype=torch.float64)
    weights[torch.rand(B, A, K, generator=generator) < 0.3] = 0.0
    weights[..., 0] = 0.0
    return hidden, labels, weights, torch.randn(B, A, K, H, generator=generator, dtype=torch.float64)


def same(loss: BlockLoss, expected: Tensor, hidden: Tensor) -> None:
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    (got,) = torch.autograd.grad(loss.total, hidden)
    (want,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(heads())), st.integers(0, 999), st.integers(1, 30), st.integers(1, 12))
def test_ce_equals_the_reference(name: str, seed: int, slots: int, columns: int) -> None:
    hidden, labels, weights, _ = problem(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash.model.loss, "_TILE", {"cpu": (slots, columns)})
        loss = block_loss(hidden, heads()[name], labels, weights)
    same(loss, (reference.cross_entropy(hidden, heads()[name], labels) * weights).sum(), hidden)
    torch.testing.assert_close(loss.weight, weights.sum())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(heads())), st.integers(0, 999))
def test_kl_equals_the_reference(name: str, seed: int) -> None:
    hidden, labels, weights, states = problem(seed)
    loss = block_loss(hidden, heads()[name], labels, weights, "kl", states)
    same(loss, (reference.divergence(hidden, heads()[name], states) * weights).sum(), hidden)


def test_kl_of_the_target_to_itself_is_zero_with_no_gradient() -> None:
    hidden, labels, weights, _ = problem(0)
    loss = block_loss(hidden, heads()["all"], labels, weights, "kl", hidden.detach())
    (gradient,) = torch.autograd.grad(loss.total, hidden)
    assert abs(float(loss.total)) < 1e-12
    assert float(gradient.abs().max()) < 1e-12


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(heads())), st.integers(0, 999))
def test_dpace_equals_the_reference_with_weights_detached(name: str, seed: int) -> None:
    hidden, labels, weights, _ = problem(seed)
    counted = weights > 0
    loss = block_loss(hidden, heads()[name], labels, weights, "dpace")
    each = reference.cross_entropy(hidden, heads()[name], labels)
    by_block = zip((-each.detach()).exp().flatten(0, 1), counted.flatten(0, 1), strict=True)
    expected = torch.stack([reference.dpace(q, c) for q, c in by_block]).view_as(weights)
    same(loss, (each * expected).sum(), hidden)
    torch.testing.assert_close(loss.weight, expected.sum())


def test_dpace_worked_out_by_hand() -> None:
    # q = ½, ½, 0 → smoothed ¾, ¾, ½ → reached .75, .5625, .28125; slot 0 does not count.
    weights = dpace_weights(torch.tensor([0.9, 0.5, 0.5, 0.0]), torch.tensor([False, True, True, True]))
    torch.testing.assert_close(weights, torch.tensor([0, 1.59375, 0.84375, 0.28125]))


@pytest.mark.parametrize("kind", ["ce", "kl"])  # D-PACE's weights are constants to its gradient, not to a check
@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradcheck(kind: str, name: str) -> None:
    hidden, labels, weights, states = problem(3)

    def total(x: Tensor) -> Tensor:
        return block_loss(x, heads()[name], labels, weights, kind, states if kind == "kl" else None).total  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(total, hidden)


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_no_gradient_for_the_head_or_the_target(kind: str) -> None:
    hidden, labels, weights, states = problem(0)
    head = heads()["bias"]
    assert head.bias is not None
    for tensor in (head.weight, head.bias, states):
        tensor.requires_grad_()
    loss = block_loss(hidden, head, labels, weights, kind, states if kind == "kl" else None)  # type: ignore[arg-type]
    loss.total.backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0
    assert head.weight.grad is None
    assert head.bias.grad is None
    assert states.grad is None


def test_slots_that_do_not_count_get_no_gradient_and_are_never_read() -> None:
    hidden, labels, weights, _ = problem(5)
    with torch.no_grad():
        hidden[weights == 0] = torch.nan
    labels[weights == 0] = -1
    loss = block_loss(hidden, heads()["plain"], labels, weights)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad[weights == 0], torch.zeros_like(hidden)[weights == 0])


def test_no_counted_slot_gives_zero() -> None:
    hidden, labels, weights, states = problem(0)
    for kind in ("ce", "dpace", "kl"):
        loss = block_loss(hidden, heads()["plain"], labels, weights * 0, kind, states if kind == "kl" else None)  # type: ignore[arg-type]
        assert float(loss.total) == float(loss.weight) == 0.0


def test_correct_by_slot_counts_where_the_label_is_the_first_of_the_largest() -> None:
    hidden, labels, weights, _ = problem(2)
    head = heads()["plain"]
    head.weight[[0, 2]] *= 4.0
    head.weight[7] = head.weight[2]  # a tie over tiles
    head.weight[1] = head.weight[0]  # and one inside a tile
    with torch.no_grad():
        hidden[0, 0, 1:], hidden[0, 1, 1:] = 9 * head.weight[0], 9 * head.weight[2]
    weights[0, :2, 1:] = 1.0
    best = head.logits(hidden).argmax(-1)
    assert {0, 2} <= set(best[weights > 0].tolist())
    for shift in (best, labels, torch.where(best == 2, 7, best), torch.where(best == 0, 1, best)):
        loss = block_loss(hidden, head, shift, weights)
        right = ((best == shift) & (weights > 0)).float().flatten(0, 1).sum(0)
        assert torch.equal(loss.correct_by_slot, right)
        assert torch.equal(loss.counted_by_slot, (weights > 0).float().flatten(0, 1).sum(0))


def test_sums_of_micro_batches_are_the_sums_of_the_whole() -> None:
    hidden, labels, weights, _ = problem(4)
    whole = block_loss(hidden, heads()["all"], labels, weights)
    parts = [block_loss(hidden[b : b + 1], heads()["all"], labels[b : b + 1], weights[b : b + 1]) for b in range(B)]
    torch.testing.assert_close(parts[0].total + parts[1].total, whole.total, rtol=0, atol=1e-12)
    (want,) = torch.autograd.grad(whole.total, hidden)
    (got,) = torch.autograd.grad(parts[0].total + parts[1].total, hidden)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    hidden, labels, weights, _ = problem(6)
    loss = block_loss(hidden.detach() * 1e4, heads()["plain"], labels, weights)
    expected = (reference.cross_entropy(hidden.detach() * 1e4, heads()["plain"], labels) * weights).sum()
    torch.testing.assert_close(loss.total, expected)


def test_a_bfloat16_head_rounds_logits_alone() -> None:
    hidden, labels, weights, _ = problem(6)
    hidden = hidden.detach().float().requires_grad_()
    head = Head(heads()["plain"].weight.float())
    exact = block_loss(hidden, head, labels, weights.float())
    rounded = block_loss(hidden, head.to(torch.bfloat16), labels, weights.float())
    assert rounded.total.dtype == torch.float32
    # 8 bits of inputs and logits: relative error of a few 2⁻⁸.
    torch.testing.assert_close(rounded.total, exact.total, rtol=0.02, atol=0)


def test_states_of_a_slot_are_those_before_its_label() -> None:
    final = torch.arange(10.0)[None, :, None]
    states = label_states(final, torch.tensor([[3, 8]]), 4)
    assert states[0, :, :, 0].tolist() == [[2, 3, 4, 5], [7, 8, 9, 9]]


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
@pytest.mark.parametrize("p", [0.99, 0.999])
def test_the_gradient_of_a_confident_slot_is_not_lost_in_bfloat16(
    kind: LossKind, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Label 1 has p, its one competitor, in the same tile, the rest; the target of `kl` is four times as sure."""
    monkeypatch.setattr(dflash.model.loss, "_TILE", {"cpu": (4, 3)})
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=generator).bfloat16()
    exact = weight.double()

    def state(sure: float) -> Tensor:
        # float32 solves for logits 0 of the competitor, log(p / (1 − p)) of the label, far less of all others.
        logits = torch.tensor([[-30.0, torch.logit(torch.tensor(sure)), 0.0, -30.0, -30.0, -30.0]])
        return (logits.double() @ torch.linalg.pinv(exact).T).bfloat16()

    hidden, states = state(p)[None, None].float().requires_grad_(), state(1 - (1 - p) / 4)[None, None]
    theirs = states if kind == "kl" else None
    loss = block_loss(hidden, Head(weight), torch.tensor([[[1]]]), torch.ones(1, 1, 1), kind, theirs)
    (got,) = torch.autograd.grad(loss.total, hidden)
    # The drafter's own logits are rounded to bfloat16 before the softmax: so are the reference's.
    q = (hidden[0, 0].detach().bfloat16() @ weight.T).double().softmax(-1)
    label = torch.nn.functional.one_hot(torch.tensor([1]), 6).double()
    wanted = (states[0, 0] @ weight.T).double().softmax(-1) if kind == "kl" else label
    want = (q - wanted) @ exact * float(loss.weight)
    assert float((got[0, 0].double() - want).norm() / want.norm()) < 0.01


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_columns_that_the_head_rules_out_have_no_mass_on_either_side(kind: LossKind) -> None:
    """−∞ in the head's bias: whole tiles first and last, and single columns; the same as a head without those rows."""
    hidden, labels, weights, states = problem(7)
    head = heads()["bias"]
    assert head.bias is not None
    out = torch.tensor([0, 1, 2, 5, 8, 9, 10])
    kept = torch.tensor([3, 4, 6, 7])
    labels %= 4
    theirs = states if kind == "kl" else None
    head.bias[out] = -torch.inf
    loss = block_loss(hidden, head, kept[labels], weights, kind, theirs)
    assert torch.isfinite(loss.total)
    same(
        loss, block_loss(hidden, Head(head.weight[kept], head.bias[kept]), labels, weights, kind, theirs).total, hidden
    )
