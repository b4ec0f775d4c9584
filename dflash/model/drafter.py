"""The drafter: Qwen3-shaped layers that read the target's features and fill a block of masks in one pass.

    F = RMSNorm(fc([h_1; …; h_N]))            once per row, shared by all layers     (arXiv 2602.06036, section 3)
    queries from the block; keys and values from [F(context) ; block] through each layer's own projections

The embedding and the head are the target's and stay there; parameter names are those of the public checkpoints.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash.model.attention import AttentionPlan, attention_plan, block_attention
from dflash.model.rope import Rope, rotate


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and what they mean."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    taps: tuple[int, ...]
    num_target_layers: int
    vocab_size: int
    mask_token_id: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DrafterShape":
        """Inverse of `to_json`."""
        return cls(**value | {"taps": tuple(value["taps"])})


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
        self.q_norm = Norm(head, eps=shape.rms_norm_eps)
        self.k_norm = Norm(head, eps=shape.rms_norm_eps)

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
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """One drafter layer."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, block: Tensor, context: ContextState, plan: AttentionPlan, angles: Tensor) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, plan, angles)
        out: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class Drafter(nn.Module):
    """The trainable part; `embed` and the head come from the target."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.rope = Rope(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps)

    def context(self, features: Float[Tensor, "B S N*H"], start: Int[Tensor, " B"] | None = None) -> list[ContextState]:
        """Keys and values of every layer for features at positions start, start+1, … of each row; None: from 0 on."""
        fused = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
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
        plan = attention_plan(anchor, context[0].key.shape[1], embedded.shape[2])
        hidden = embedded
        for layer, state in zip(self._layers(), context, strict=True):
            hidden = layer(hidden, state, plan, angles)
        out: Tensor = self.norm(hidden)
        return out

    def forward(
        self, features: Float[Tensor, "B S N*H"], embedded: Float[Tensor, "B A K H"], anchor: Int[Tensor, "B A"]
    ) -> Float[Tensor, "B A K H"]:
        return self.blocks(self.context(features), embedded, anchor)

    def _layers(self) -> list[Layer]:
        return cast("list[Layer]", list(self.layers))


def embed_blocks(embedding: nn.Module, anchor_token: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Embeddings of blocks `[anchor's token, mask, …, mask]`: `[…, K, H]` for anchor tokens `[…]`."""
    block = torch.full((*anchor_token.shape, block_size), mask_token_id, device=anchor_token.device)
    block[..., 0] = anchor_token
    embedded: Tensor = embedding(block)
    return embedded
