"""The drafter: Qwen3-shaped layers that read the target's features and fill a block of masks in one pass.

    F = RMSNorm(fc([h_1; …; h_N]))            once per row, shared by all layers     (arXiv 2602.06036, section 3)
    queries from the block; keys and values from [F(context) ; block] through each layer's own projections

The embedding and the head are the target's and stay there; parameter names are those of the public checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash.model.attention import AttentionPlan, attention_plan, block_attention
from dflash.model.convolution import Convolution
from dflash.model.flex import Window
from dflash.model.kinds import KINDS
from dflash.model.lean import LeanNorm, autocast_dtype, swiglu
from dflash.model.look_back import LookBack
from dflash.model.markov import ConfidenceHead
from dflash.model.rope import Rope, rotate
from dflash.model.shape import DrafterShape as DrafterShape
from dflash.model.vocabulary import Vocabulary

Recompute = Literal["none", "mlp", "layers"]  # what the backward pass makes again instead of keeping it


@dataclass(frozen=True, slots=True)
class ContextState:
    """Keys and values of one layer over the context, `[B,S,G,D]` each, keys rotated to their positions."""

    key: Float[Tensor, "B S G D"]
    value: Float[Tensor, "B S G D"]


class Norm(nn.RMSNorm):
    """RMSNorm in its weight's dtype: for a bfloat16 input under autocast torch has no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Attention of a block over the context's features and itself."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        hidden, head = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head, hidden, bias=False)
        self.q_norm = LeanNorm(head, eps=shape.rms_norm_eps)
        self.k_norm = LeanNorm(head, eps=shape.rms_norm_eps)

    def keys(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of `hidden [..., H]`, each `[..., G, D]`."""
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, angles), self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))

    def forward(self, block: Tensor, context: ContextState, plan: AttentionPlan, angles: Tensor) -> Tensor:
        query = rotate(self.q_norm(self.q_proj(block).unflatten(-1, (-1, self.head_dim))), angles)
        key, value = self.keys(block, angles)
        out = block_attention(query, context.key, context.value, key, value, plan)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))
        return out


class Layer(nn.Module):
    """One drafter layer."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = LeanNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = LeanNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)
        convolved = KINDS[shape.kind].convolutions
        self.attention_conv = Convolution(shape) if convolved else None
        self.mlp_conv = Convolution(shape) if convolved else None

    def forward(
        self, block: Tensor, context: ContextState, plan: AttentionPlan, angles: Tensor, recompute: Recompute = "none"
    ) -> Tensor:
        if recompute == "layers":
            return _made_again(lambda hidden: self._second(self._first(hidden, context, plan, angles)), block)
        block = self._first(block, context, plan, angles)
        return _made_again(self._second, block) if recompute == "mlp" else self._second(block)

    def _first(self, block: Tensor, context: ContextState, plan: AttentionPlan, angles: Tensor) -> Tensor:
        def attend(normed: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(normed, context, plan, angles)
            return attended

        return block + _around(self.attention_conv, self.input_layernorm(block), attend)

    def _second(self, block: Tensor) -> Tensor:
        return block + _around(self.mlp_conv, self.post_attention_layernorm(block), self.mlp)


def _around(convolution: Convolution | None, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    out: Tensor = sublayer(normed) if convolution is None else convolution(normed, sublayer)
    return out


def _made_again(part: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
    """`part(block)`, of which only `block` is kept; there is nothing random in it."""
    out: Tensor = checkpoint(part, block, use_reentrant=False, preserve_rng_state=False)
    return out


class Drafter(nn.Module):
    """The trainable part; `embed` and the head come from the target."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.recompute: Recompute = "none"
        self.rope = Rope(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = LeanNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        head = KINDS[shape.kind].look_back
        if head is not None and shape.rank:
            self.add_module(head.name, head(shape))
        self.confidence_head = ConfidenceHead(shape) if shape.confidence else None
        self.vocabulary = Vocabulary(shape.vocabulary) if shape.vocabulary else None

    @property
    def look_back(self) -> LookBack | None:
        """The head that sees the token before a slot, where this kind has one."""
        head = KINDS[self.shape.kind].look_back
        return cast("LookBack", self.get_submodule(head.name)) if head is not None and self.shape.rank else None

    def context(self, features: Float[Tensor, "B S N*H"], start: Int[Tensor, " B"] | None = None) -> list[ContextState]:
        """Keys and values of every layer for features at positions start, start+1, … of each row; None: from 0 on."""
        fused = self.hidden_norm(self.fc(features.to(autocast_dtype(features.device) or self.fc.weight.dtype)))
        positions = torch.arange(features.shape[1], device=features.device)
        if start is not None:
            positions = start[:, None] + positions
        angles = self.rope(positions)
        return [ContextState(*layer.self_attn.keys(fused, angles)) for layer in self._layers()]

    def blocks(
        self, context: list[ContextState], embedded: Float[Tensor, "B A K H"], anchor: Int[Tensor, "B A"]
    ) -> Float[Tensor, "B A K H"]:
        """Final hidden states of the slots, ready for the target's head."""
        slots = torch.arange(embedded.shape[2], device=embedded.device)
        angles = self.rope(anchor[..., None] + slots)
        size = (context[0].key.shape[1], embedded.shape[2])
        windows = {self._window(number) for number in range(len(context))}
        plans = {window: attention_plan(anchor, *size, window) for window in windows}
        hidden = embedded
        for number, (layer, state) in enumerate(zip(self._layers(), context, strict=True)):
            hidden = layer(hidden, state, plans[self._window(number)], angles, self.recompute)
        out: Tensor = self.norm(hidden)
        return out

    def forward(
        self, features: Float[Tensor, "B S N*H"], embedded: Float[Tensor, "B A K H"], anchor: Int[Tensor, "B A"]
    ) -> Float[Tensor, "B A K H"]:
        return self.blocks(self.context(features), embedded, anchor)

    def _window(self, layer: int) -> Window | None:
        shape = self.shape
        if shape.sliding_window is None or layer not in shape.sliding_layers:
            return None
        return Window(shape.sliding_window, shape.sliding_causal)

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))


def embed_blocks(
    embedding: nn.Module,
    anchor_token: Tensor,
    block_size: int,
    mask_token_id: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Embeddings of blocks `[anchor's token, mask, …, mask]`: `[…, K, H]` for anchor tokens `[…]`.

    The masks' one row is embedded once. With `dtype` the rows are converted, not the blocks, which are K times as many.
    """
    first: Tensor = embedding(anchor_token)
    mask: Tensor = embedding(anchor_token.new_full((), mask_token_id))
    dtype = dtype or first.dtype
    masks = mask.to(dtype).expand(*anchor_token.shape, block_size - 1, -1)
    return torch.cat([first.to(dtype)[..., None, :], masks], dim=-2)
