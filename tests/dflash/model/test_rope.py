"""Rotary positions: each type's own formula, float32 whatever the autocast, unknown types refused."""

import math

import pytest
import torch

from dflash.errors import TargetMismatch
from dflash.model.rope import Rope, rotate

D, THETA, LONGEST = 8, 100.0, 64
BASE = [THETA ** (-2 * i / D) for i in range(D // 2)]


def rope(kind: str, **parameters: float) -> Rope:
    return Rope({"rope_type": kind, "rope_theta": THETA, **parameters}, D, LONGEST)


def yarn(factor: float, original: float) -> list[float]:
    """A ramp between the frequency and its part, by how often a dimension turns within the original length."""

    def dimension(turns: float) -> float:
        return D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), D - 1)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(D // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(BASE, ramp, strict=True)]


def llama3(factor: float, low: float, high: float, original: float) -> list[float]:
    """Long waves are stretched, short ones kept, those between blended."""
    out = []
    for f in BASE:
        wave = 2 * math.pi / f
        smooth = (original / wave - low) / (high - low)
        out.append(
            f / factor
            if wave > original / low
            else f
            if wave < original / high
            else (1 - smooth) * f / factor + smooth * f
        )
    return out


def test_default_and_linear_have_their_own_formula() -> None:
    torch.testing.assert_close(rope("default").inverse.tolist(), BASE)
    torch.testing.assert_close(rope("linear", factor=4.0).inverse.tolist(), [f / 4 for f in BASE])


def test_yarn_has_its_own_formula_and_scales_the_attention() -> None:
    made = rope("yarn", factor=4.0, original_max_position_embeddings=16)
    torch.testing.assert_close(made.inverse.tolist(), yarn(4.0, 16))
    assert made.scaling == pytest.approx(0.1 * math.log(4.0) + 1)


def test_llama3_scaling_is_kept() -> None:
    parameters = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = rope("llama3", original_max_position_embeddings=32, **parameters)
    torch.testing.assert_close(made.inverse.tolist(), llama3(8.0, 1.0, 4.0, 32))


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(TargetMismatch, match="'foo', expected one of default"):
        rope("foo")


@pytest.mark.parametrize("autocast", [False, True])
def test_angles_are_float32_whatever_the_autocast(autocast: bool) -> None:
    positions = torch.tensor([0, 1, 3071])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        angles = rope("default")(positions)
    assert angles.dtype == torch.float32
    exact = torch.tensor([[p * f for f in BASE] for p in positions.tolist()], dtype=torch.float64)
    # 3071 · 2⁻²⁴ of a radian; in bfloat16 the angle of position 3071 would be off by 12 radians.
    torch.testing.assert_close(angles[:, 0].double(), exact.cos(), rtol=0, atol=4e-4)
    torch.testing.assert_close(angles[:, 1].double(), exact.sin(), rtol=0, atol=4e-4)


def test_a_module_in_bfloat16_keeps_its_positions() -> None:
    positions = torch.tensor([0, 1, 3071])
    exact = rope("default")
    assert torch.equal(rope("default").to(torch.bfloat16)(positions), exact(positions))
    assert torch.equal(rope("default").double().inverse, exact.inverse)
    assert exact.to("meta").inverse.device.type == "meta"


def test_products_depend_on_the_distance_alone_and_lengths_are_kept() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, D, dtype=torch.float64), torch.randn(1, D, dtype=torch.float64)
    at = rope("default")
    scores = [float(rotate(q, at(torch.tensor(p + 5))) @ rotate(k, at(torch.tensor(p))).T) for p in (0, 7, 40)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    assert float(rotate(q, at(torch.tensor(9))).norm()) == pytest.approx(float(q.norm()), abs=1e-6)


def test_dtype_of_what_is_rotated_is_kept() -> None:
    angles = rope("default")(torch.tensor([3]))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert rotate(torch.ones(1, 2, D, dtype=dtype), angles).dtype == dtype
