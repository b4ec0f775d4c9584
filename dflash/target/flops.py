"""Floating-point operations of target and drafter, from their shapes: what a row costs before anything has been timed.

A product of a weight with a vector is 2 operations a weight, 6 with its backward pass. Attention is left out: below
3,072 tokens it is a few per cent of either (benchmarks/balance.py shows that balance does not hang on so much).
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from dflash.model.convolution import GROUP
from dflash.model.drafter import DrafterShape
from dflash.model.kinds import KINDS


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of the target a context token, of the drafter a context token and a slot, its backward pass too."""

    target_token: float
    drafter_token: float
    drafter_slot: float


def flops(config: PreTrainedConfig, shape: DrafterShape, *, final: bool = False) -> Flops:
    """`config` is the target's text config. The target runs up to its last tap, or to its end with `final`; the head
    makes logits and their gradient."""
    hidden, heads, groups, width = shape.hidden_size, shape.num_heads, shape.num_key_value_heads, shape.head_dim
    # Of a mixture of experts a token passes through a few.
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    inner = experts * int(getattr(config, "moe_intermediate_size", None) or 0) or shape.intermediate_size
    attention = hidden * width * (2 * heads + 2 * groups)
    key_value = 2 * hidden * width * groups
    fc = len(shape.taps) * hidden * hidden
    drafter_layer = attention + 3 * hidden * shape.intermediate_size
    if KINDS[shape.kind].convolutions:
        drafter_layer += 2 * 2 * 2 * hidden * hidden // GROUP  # 2 sublayers, 2 sides, 2 taps
    return Flops(
        target_token=2.0
        * (shape.num_target_layers if final else max(shape.taps) + 1)
        * (attention + 3 * hidden * inner),
        drafter_token=6.0 * (fc + shape.num_layers * key_value),
        drafter_slot=6.0 * shape.num_layers * drafter_layer + 4.0 * shape.num_drafted * hidden,
    )
