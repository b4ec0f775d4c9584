"""The drafter against the paper's formulas in loops; what a block may not see, by perturbation; batch invariance."""

from collections.abc import Callable

import drafter_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.model.drafter import Drafter, DrafterShape, embed_blocks
from dflash.model.head import Head
from dflash.model.loss import LossKind, block_loss

SHAPE = DrafterShape(
    hidden_size=8,
    intermediate_size=12,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_layers=2,
    block_size=4,
    taps=(1, 2, 4),
    num_target_layers=6,
    vocab_size=13,
    mask_token_id=12,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)
S, A, K, WIDTH = 12, 3, 4, 24


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    torch.manual_seed(0)
    drafter = Drafter(SHAPE).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter


def inputs(rows: int, length: int = S, anchors: int = A, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    embedded = torch.randn(rows, anchors, K, SHAPE.hidden_size, generator=generator, dtype=torch.float64)
    anchor = torch.stack([torch.randperm(length, generator=generator)[:anchors].sort().values for _ in range(rows)])
    return features, embedded, anchor


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 2), st.integers(3, 9), st.integers(1, 3), st.integers(0, 99))
def test_equals_the_paper_in_loops_forward_and_backward(
    drafter: Drafter, rows: int, length: int, anchors: int, seed: int
) -> None:
    features, embedded, anchor = inputs(rows, length, anchors, seed)
    weights = dict(drafter.named_parameters())
    out = drafter(features, embedded, anchor)
    expected = torch.stack(
        [
            torch.stack(
                [
                    reference.drafter_block(weights, SHAPE, features[b], embedded[b, a], int(anchor[b, a]))
                    for a in range(anchors)
                ]
            )
            for b in range(rows)
        ]
    )
    # Angles are made in float32: position < 16 times 2⁻²⁴ is 1e-6 of a radian, over two layers.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    got = torch.autograd.grad(out.square().sum(), list(weights.values()))
    want = torch.autograd.grad(expected.square().sum(), list(weights.values()))
    for name, a, b in zip(weights, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def changed(drafter: Drafter, change: Callable[[Tensor, Tensor], None]) -> Tensor:
    """Largest difference of each block's output, `[rows, A]`, after `change(features, embedded)`."""
    features, embedded, _ = inputs(2)
    anchor = torch.tensor([[2, 4, 6], [2, 4, 6]])
    before = drafter(features, embedded, anchor)
    change(features, embedded)
    return (drafter(features, embedded, anchor) - before).detach().abs().amax(dim=(2, 3))


@pytest.mark.parametrize("position", range(S))
def test_a_block_sees_the_features_before_its_anchor_and_no_others(drafter: Drafter, position: int) -> None:
    def change(features: Tensor, embedded: Tensor) -> None:
        features[0, position] += 1.0

    difference = changed(drafter, change)
    for a, anchor in enumerate((2, 4, 6)):
        assert (difference[0, a] != 0) == (position < anchor), f"feature {position}, block at {anchor}"


def test_features_at_or_after_the_anchor_do_not_leak_from_overlapping_blocks(drafter: Drafter) -> None:
    def change(features: Tensor, embedded: Tensor) -> None:
        features[:, 6:] = 100.0

    assert not changed(drafter, change).any()


def test_another_row_does_not_leak(drafter: Drafter) -> None:
    def change(features: Tensor, embedded: Tensor) -> None:
        features[1] += 1.0
        embedded[1] += 1.0

    difference = changed(drafter, change)
    assert not difference[0].any()
    assert difference[1].all()


def test_another_block_does_not_leak(drafter: Drafter) -> None:
    def change(features: Tensor, embedded: Tensor) -> None:
        embedded[0, 1] += 1.0

    assert changed(drafter, change).ne(0).tolist() == [[False, True, False], [False, False, False]]


@pytest.mark.parametrize("slot", range(K))
def test_every_slot_of_a_block_sees_every_other_in_both_directions(drafter: Drafter, slot: int) -> None:
    features, embedded, anchor = inputs(1)
    before = drafter(features, embedded, anchor)
    embedded[0, 1, slot] += 1.0
    difference = (drafter(features, embedded, anchor) - before).detach().abs().amax(dim=3)[0]
    assert difference[1].all()
    assert not difference[[0, 2]].any()


def test_padding_does_not_leak_whatever_it_holds(drafter: Drafter) -> None:
    features, embedded, anchor = inputs(1)
    padded = torch.cat([features, torch.full((1, 5, WIDTH), 1e9, dtype=torch.float64)], dim=1)
    assert torch.equal(drafter(padded, embedded, anchor), drafter(features, embedded, anchor))


def test_padding_anchors_change_nothing(drafter: Drafter) -> None:
    features, embedded, anchor = inputs(1)
    more = torch.cat([anchor, anchor[:, -1:]], dim=1)
    embedded_more = torch.cat([embedded, torch.full_like(embedded[:, :1], 7.0)], dim=1)
    torch.testing.assert_close(
        drafter(features, embedded_more, more)[:, :A], drafter(features, embedded, anchor), rtol=0, atol=1e-12
    )


def loss_and_gradient(
    drafter: Drafter, rows: list[int], padded: int, kind: LossKind
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Σ w·loss and Σ w of some of four rows of unequal length, and the gradient."""
    generator = torch.Generator().manual_seed(9)
    lengths = [12, 7, 9, 5]
    features = torch.randn(4, 12, WIDTH, generator=generator, dtype=torch.float64)
    embedded = torch.randn(4, A, K, SHAPE.hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 13, (4, A, K), generator=generator)
    weights = torch.rand(4, A, K, generator=generator, dtype=torch.float64)
    head = Head(torch.randn(13, SHAPE.hidden_size, generator=generator, dtype=torch.float64))
    states = torch.randn(4, A, K, SHAPE.hidden_size, generator=generator, dtype=torch.float64)[rows]
    anchor = torch.tensor([[1, 5, 9], [0, 3, 6], [2, 2, 8], [1, 3, 4]])
    batch = torch.full((len(rows), padded, WIDTH), 55.0, dtype=torch.float64)
    for b, row in enumerate(rows):
        batch[b, : lengths[row]] = features[row, : lengths[row]]
    hidden = drafter(batch, embedded[rows], anchor[rows])
    loss = block_loss(hidden, head, labels[rows], weights[rows], kind, states if kind == "kl" else None)
    return loss.total, loss.weight, list(torch.autograd.grad(loss.total, list(drafter.parameters())))


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2, 0, 3], [1]]])
def test_a_row_alone_padded_or_in_another_micro_batch_gives_the_same_sums(
    drafter: Drafter, split: list[list[int]], kind: LossKind
) -> None:
    whole, whole_weight, whole_gradient = loss_and_gradient(drafter, [0, 1, 2, 3], 15, kind)
    parts = [loss_and_gradient(drafter, rows, 12, kind) for rows in split]
    torch.testing.assert_close(sum(p[0] for p in parts), whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(p[1] for p in parts), whole_weight, rtol=0, atol=1e-10)
    for index, want in enumerate(whole_gradient):
        torch.testing.assert_close(sum(p[2][index] for p in parts), want, rtol=0, atol=1e-10)


def test_every_tensor_matters(drafter: Drafter) -> None:
    features, embedded, anchor = inputs(1)
    before = drafter(features, embedded, anchor)
    for name, parameter in drafter.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            # Random, since a norm takes a common factor away from the weights that feed it.
            parameter.add_(torch.rand_like(parameter))
            assert not torch.allclose(drafter(features, embedded, anchor), before), name
            parameter.copy_(kept)


def test_context_in_pieces_is_the_context(drafter: Drafter) -> None:
    features, _, _ = inputs(2)
    whole = drafter.context(features)
    start = torch.tensor([5, 5])
    pieces = zip(drafter.context(features[:, :5]), drafter.context(features[:, 5:], start), strict=True)
    for state, (first, second) in zip(whole, pieces, strict=True):
        torch.testing.assert_close(torch.cat([first.key, second.key], dim=1), state.key, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([first.value, second.value], dim=1), state.value, rtol=0, atol=1e-12)


def test_norms_under_autocast_are_fused_and_in_float32(drafter: Drafter, recwarn: pytest.WarningsRecorder) -> None:
    single = Drafter(SHAPE)
    single.load_state_dict(drafter.state_dict())
    features, embedded, anchor = inputs(2)
    exact = single(features, embedded.float(), anchor)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = single(features, embedded.float(), anchor)
    assert rounded.dtype == torch.float32
    # Products are rounded to 8 bits, over two layers and a norm.
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)
    assert not [warning for warning in recwarn if "fused" in str(warning.message)]


def test_names_are_those_of_the_public_checkpoints(drafter: Drafter) -> None:
    names = {name for name in drafter.state_dict() if not name.startswith("layers.1.")}
    attention = {f"layers.0.self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    mlp = {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    norms = {"layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"}
    assert names == attention | mlp | norms | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_shape_survives_json() -> None:
    assert DrafterShape.from_json(SHAPE.to_json()) == SHAPE


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_blocks_are_embedded_as_their_tokens_and_masks_once(dtype: torch.dtype | None) -> None:
    embedding, looked_up = torch.nn.Embedding(9, 5, dtype=torch.bfloat16), []
    embedding.register_forward_pre_hook(lambda _, arguments: looked_up.append(arguments[0].numel()))
    tokens = torch.tensor([[3, 1], [8, 3]], dtype=torch.int32)
    blocks = torch.tensor([[[3, 7, 7], [1, 7, 7]], [[8, 7, 7], [3, 7, 7]]])
    out = embed_blocks(embedding, tokens, 3, 7, dtype)
    assert looked_up == [4, 1]
    assert torch.equal(out, embedding(blocks).to(dtype or torch.bfloat16))
