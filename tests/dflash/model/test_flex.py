"""What a GPU sees of a pass: the rule and its tiles against the plain mask, attention against loops, compiled forms."""

import random
from collections.abc import Iterator

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_mask

from dflash.model import flex
from dflash.model.attention import visible
from dflash.model.flex import TILE, FlexMask, Window, flex_block_attention, flex_mask, num_compiles

WINDOWS = [None, Window(1), Window(3, causal=True), Window(200), Window(150, causal=True)]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo traces as ever, and what it traced runs as it is."""
    monkeypatch.setattr(flex, "_BACKEND", "eager")
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    with torch.fx.experimental._config.patch(use_duck_shape=True):  # it is put back
        yield
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Anchors, context, slots of a block: over several tiles, also with blocks that cross from one to the next."""
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    context, slots = draw(st.integers(1, 700)), draw(st.sampled_from([3, 8, 16, 200]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (
        torch.randint(0, context + 1, (rows, min(blocks, 640 // slots)), generator=random).sort(1).values,
        context,
        slots,
    )


def parts(mask: FlexMask) -> tuple[Tensor, Tensor, Tensor]:
    """The rule by element, tiles of which some is seen and tiles of which all is seen, spread over their elements."""
    blocks = mask.blocks
    rows, columns = mask.slots, mask.context + mask.slots
    rule = create_mask(blocks.mask_mod, blocks.kv_num_blocks.shape[0], 1, rows, columns, device="cpu")[:, 0]
    spread = []
    for counts, indices in (
        (blocks.kv_num_blocks, blocks.kv_indices),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        chosen = torch.arange(indices.shape[-1]) < counts[..., None]
        tiles = torch.zeros_like(indices, dtype=torch.bool).scatter(-1, indices.long(), chosen)[:, 0]
        spread.append(tiles.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2))
    return rule, *spread


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(WINDOWS))
def test_tiles_and_rule_are_the_mask(problem: tuple[Tensor, int, int], window: Window | None) -> None:
    anchor, context, block_size = problem
    mask = flex_mask(anchor, context, block_size, window)
    rule, partly, wholly = parts(mask)
    assert not (partly & wholly).any()
    assert not (wholly & ~rule).any(), "in these tiles nobody asks the rule"
    count = anchor.shape[1] * block_size
    seen = wholly | (partly & rule)
    for row, positions in zip(seen, anchor, strict=True):
        whole = row[:count]
        columns = torch.cat([whole[:, :context], whole[:, mask.context : mask.context + count]], dim=1)
        assert torch.equal(columns, visible(positions, context, block_size, window))
        assert whole.sum() == columns.sum(), "padding is not seen"
        assert row.any(1).all(), "a slot that sees nothing has no softmax"


def test_tiles_that_nobody_sees_are_skipped() -> None:
    anchor = torch.arange(0, 4096, 64)[None]
    rule, partly, wholly = parts(flex_mask(anchor, 4096, 16))
    assert (partly | wholly).float().mean() < 1.3 * rule.float().mean() + 2 * TILE / 4096


def tensors(anchor: Tensor, context: int, block_size: int) -> list[Tensor]:
    rows, blocks = anchor.shape
    shapes = [(rows, blocks, block_size, 2, 4), *[(rows, context, 1, 4)] * 2, *[(rows, blocks, block_size, 1, 4)] * 2]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.usefixtures("eager")
def test_attention_equals_loops_in_few_forms() -> None:
    """Over 200 passes of any size, with one row and with several: one form for each of the two."""
    draw, before = random.Random(0), num_compiles()
    for number in range(200):
        rows, blocks, context = draw.choice([1, 2, 3]), draw.randint(1, 70), draw.randint(1, 300)
        anchor = torch.randint(0, context + 1, (rows, blocks)).sort(1).values
        mask, inputs = flex_mask(anchor, context, 4), tensors(anchor, context, 4)
        out = flex_block_attention(*inputs, mask)
        if number % 20 == 0:
            torch.testing.assert_close(out, reference.attention(*inputs, anchor), rtol=0, atol=1e-12)
    assert num_compiles() - before == 2


@pytest.mark.usefixtures("eager")
def test_one_form_more_than_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the eager form, which holds all scores at once."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    for window in (None, Window(5)):
        anchor = torch.tensor([[0, 4, 9]])
        inputs = tensors(anchor, 9, 4)
        if window is None:
            flex_block_attention(*inputs, flex_mask(anchor, 9, 4, window))
        else:
            with pytest.raises(FailOnRecompileLimitHit):
                flex_block_attention(*inputs, flex_mask(anchor, 9, 4, window))
