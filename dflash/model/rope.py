"""Rotary positions. Frequencies are the library's for each rope type; angles are made and applied in float32."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.errors import TargetMismatch

ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class Rope(nn.Module):
    """Positions → cosines and sines of their angles.

    Raises TargetMismatch for a rope type that servers of drafters do not know.
    """

    inverse: Tensor

    def __init__(self, parameters: dict[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise TargetMismatch(
                f"the target's rope_type is {kind!r}, expected one of {', '.join(ROPE_TYPES)}. "
                "A drafter with other positions than its target would not be accepted; this type is not supported yet."
            )
        library = Qwen3RotaryEmbedding(
            Qwen3Config(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters))
        )
        self.scaling = float(library.attention_scaling)
        self.register_buffer("inverse", library.inv_freq.float(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rope":
        """Goes to other devices, never to another dtype: rounded frequencies are other positions."""
        exact = self.inverse
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse = exact.to(self.inverse.device)
        return self

    def forward(self, positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n 2 D/2"]:
        """cos and sin of position · inverse frequency, float32 whatever the autocast."""
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions[..., None].float() * self.inverse.float()
            return torch.stack([angles.cos(), angles.sin()], dim=-2) * self.scaling


def rotate(x: Float[Tensor, "*n heads D"], angles: Float[Tensor, "*n 2 D/2"]) -> Float[Tensor, "*n heads D"]:
    """Turn each pair (x_i, x_{i+D/2}) of a head by its position's angle."""
    cos, sin = angles[..., None, 0, :], angles[..., None, 1, :]
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
