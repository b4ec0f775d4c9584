"""Block attention against loops, forward and backward; the rule for CUDA against the same mask."""

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dflash.model.attention
from dflash.model.attention import (
    attention_plan,
    block_attention,
    one_block_plan,
)
from dflash.model.flex import Window


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Tensor], Tensor]:
    """Random sizes, float64 inputs and ascending anchors, from 0 to the context's end."""
    rows, context, blocks, slots = (draw(st.integers(1, high)) for high in (2, 9, 7, 5))
    key_heads, shared = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    anchor = [sorted(draw(st.integers(0, context)) for _ in range(blocks)) for _ in range(rows)]
    return make(rows, context, blocks, slots, key_heads, shared, seed=draw(st.integers(0, 99))), torch.tensor(anchor)


def make(rows: int, context: int, blocks: int, slots: int, key_heads: int, shared: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (rows, blocks, slots, key_heads * shared, 4),
        *[(rows, context, key_heads, 4)] * 2,
        *[(rows, blocks, slots, key_heads, 4)] * 2,
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def ours(tensors: list[Tensor], anchor: Tensor) -> Tensor:
    plan = attention_plan(anchor, tensors[1].shape[1], tensors[0].shape[2])
    return block_attention(*tensors, plan)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([1, 4, 64]))
def test_equals_loops_forward_and_backward(problem: tuple[list[Tensor], Tensor], group_slots: int) -> None:
    tensors, anchor = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash.model.attention, "_GROUP_SLOTS", group_slots)
        out = ours(tensors, anchor)
        expected = reference.attention(*tensors, anchor)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        upstream = torch.randn_like(out)
        got = torch.autograd.grad(out, tensors, upstream)
    for a, b in zip(got, torch.autograd.grad(expected, tensors, upstream, allow_unused=True), strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    anchor = torch.tensor([[0, 2, 5]])
    tensors = make(1, 5, 3, 2, 2, 2)
    assert torch.autograd.gradcheck(lambda *t: ours(list(t), anchor), tensors)


def test_inputs_without_gradient_are_read_alone() -> None:
    tensors = make(1, 6, 2, 3, 1, 1)
    detached = [t.detach() for t in tensors]
    assert not ours(detached, torch.tensor([[2, 5]])).requires_grad


def test_autocast_computes_in_its_dtype() -> None:
    tensors = [t.detach().float() for t in make(1, 6, 2, 3, 2, 2)]
    anchor = torch.tensor([[2, 5]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(tensors, anchor)
    assert out.dtype == torch.bfloat16
    # Inputs and weights are rounded to 8 bits: a value of size 3 is off by 3 · 2⁻⁸ at most, a few times.
    torch.testing.assert_close(out.float(), ours(tensors, anchor), rtol=0, atol=0.05)


@settings(max_examples=20, deadline=None)
@given(problems())
def test_one_block_a_row_equals_loops(problem: tuple[list[Tensor], Tensor]) -> None:
    (query, key, value, block_key, block_value), anchor = problem
    tensors = [query[:, :1], key, value, block_key[:, :1], block_value[:, :1]]
    plan = one_block_plan(anchor[:, :1], key.shape[1], query.shape[2])
    expected = reference.attention(*tensors, anchor[:, :1])
    torch.testing.assert_close(block_attention(*tensors, plan), expected, rtol=0, atol=1e-12)


def test_anchors_must_ascend() -> None:
    with pytest.raises(AssertionError):
        attention_plan(torch.tensor([[3, 1]]), 4, 2)


def test_bias_of_a_group_is_small() -> None:
    (groups,) = attention_plan(torch.arange(0, 1000, 10)[None], 1000, 16).groups
    assert sum(group.bias.numel() for group in groups) < 100 * 128


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_window_hides_what_is_too_far_on_every_path(size: int, causal: bool) -> None:
    window = Window(size, causal)
    tensors, anchor = make(2, 9, 3, 4, 2, 2), torch.tensor([[0, 3, 8], [2, 2, 9]])
    expected = reference.attention(*tensors, anchor, size, causal)
    out = block_attention(*tensors, attention_plan(anchor, 9, 4, window))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(out)
    for a, b in zip(
        *(torch.autograd.grad(x, tensors, upstream, allow_unused=True) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=0, atol=1e-12)
    for block in range(3):
        alone = [tensors[0][:, block : block + 1], *tensors[1:3], *(t[:, block : block + 1] for t in tensors[3:])]
        one = block_attention(*alone, one_block_plan(anchor[:, block : block + 1], 9, 4, window))
        torch.testing.assert_close(one[:, 0], expected[:, block], rtol=0, atol=1e-12)
