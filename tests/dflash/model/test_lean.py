"""Norm and SwiGLU under autocast: float32's results up to rounding, and little kept; without it, torch's own bits."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import SHAPE
from torch import Tensor, nn

from dflash.model.drafter import Drafter, Recompute
from dflash.model.lean import LeanNorm, swiglu
from dflash.training.room import estimated_bytes, saved_bytes


def gradients(outcome: Tensor, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [outcome, *torch.autograd.grad(outcome, inputs, upstream.to(outcome.dtype))]


@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_those_of_torch(autocast: bool) -> None:
    torch.manual_seed(0)
    x, y, upstream = (torch.randn(3, 5, 64) for _ in range(3))
    x, y = x.requires_grad_(), y.requires_grad_()
    norm, plain = LeanNorm(64, eps=1e-6), nn.RMSNorm(64, eps=1e-6)
    with torch.no_grad():
        plain.weight.copy_(norm.weight.normal_())
    expected = gradients(plain(x), upstream, [x, plain.weight]) + gradients(F.silu(x) * y, upstream, [x, y])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        made = gradients(norm(x), upstream, [x, norm.weight]) + gradients(swiglu(x, y), upstream, [x, y])
    assert made[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    for mine, theirs in zip(made, expected, strict=True):
        if autocast:
            assert (mine.float() - theirs).norm() < 0.005 * theirs.norm()
        else:
            assert torch.equal(mine, theirs)


def test_a_slot_keeps_what_is_estimated_from_the_shapes() -> None:
    shape = replace(SHAPE, hidden_size=256, intermediate_size=768, num_heads=2, num_key_value_heads=1, head_dim=128)
    drafter = Drafter(shape)

    def kept(anchors: int) -> int:
        features = torch.randn(1, 20, drafter.fc.in_features).bfloat16()
        anchor, embedded = torch.arange(1, anchors + 1)[None], torch.randn(1, anchors, shape.block_size, 256)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return saved_bytes(lambda: drafter(features, embedded, anchor), drafter.parameters())

    slot = (kept(16) - kept(8)) / (8 * shape.block_size)
    assert slot == pytest.approx(estimated_bytes(shape).slot, rel=0.1)


def test_what_is_made_again_gives_the_same_bits_and_is_not_kept() -> None:
    shape = replace(SHAPE, hidden_size=64, intermediate_size=192, head_dim=32, num_layers=3)
    torch.manual_seed(0)
    drafter = Drafter(shape)
    features, anchor = torch.randn(2, 20, drafter.fc.in_features), torch.tensor([[2, 9, 15], [1, 4, 20]])
    embedded = torch.randn(2, 3, shape.block_size, 64)

    def run(recompute: Recompute) -> tuple[list[Tensor], int]:
        drafter.recompute = recompute
        drafter.zero_grad()
        made: list[Tensor] = []
        kept = saved_bytes(lambda: made.append(drafter(features, embedded, anchor)), drafter.parameters())
        made[0].square().sum().backward()
        return [made[0], *(parameter.grad for parameter in drafter.parameters() if parameter.grad is not None)], kept

    whole, most = run("none")
    for recompute in ("mlp", "layers"):
        made, kept = run(recompute)
        assert len(made) == len(whole)
        assert all(map(torch.equal, made, whole))
        assert kept < 0.8 * most
        most = kept
