"""The product of few rows is the library's, up to the order of its sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dflash.model.few_rows import MOST_ROWS, decode_with_few_rows, linear


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, MOST_ROWS + 1), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_equals_the_sums_in_float64(batch: int, rows: int, width: int, out: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(batch * 1000 + rows)
    x, weight = (torch.randn(*n, width, generator=generator) for n in ((batch, rows), (out,)))
    bias = torch.randn(out, generator=generator) if has_bias else None
    with torch.no_grad():
        got = linear(x, weight, bias)
    expected = torch.einsum("brw,ow->bro", x.double(), weight.double()) + (0 if bias is None else bias.double())
    # Each of `width` products and sums rounds once, relative to terms of about 1.
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=width * 4 * torch.finfo(torch.float32).eps)


def test_layers_of_a_model_that_decodes_take_it_and_training_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4, bias=False))
    x = torch.randn(1, 3, 8, requires_grad=True)
    expected = model(x)
    decode_with_few_rows(model)
    assert torch.equal(model(x), expected), "with a gradient: the library's own product"
    monkeypatch.setattr("dflash.model.few_rows.F.linear", None)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
