"""Tiny random targets and drafters for tests of decoding, evaluation and export: built in milliseconds, exact in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dflash.config import DrafterConfig
from dflash.drafter import Drafter
from dflash.init import new_drafter
from dflash.loss import Head
from dflash.target import Target, drafter_shape

VOCABULARY, MASK, STOP = 24, 3, 2


@dataclass(frozen=True)
class Toy:
    target: Target
    drafter: Drafter
    ends: tuple[nn.Module, Head]


def llama(**changes: Any) -> PreTrainedModel:
    """A random Llama of 4 layers. Large weights: its greedy text is no constant."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "bos_token_id": 0,
            "eos_token_id": STOP,
            "pad_token_id": 1,
            "initializer_range": 0.15,
            **changes,
        }
    )
    return LlamaForCausalLM(config)


def toy(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    block_size: int = 4,
    model: PreTrainedModel | None = None,
    init: str = "target",
) -> Toy:
    """A target and a drafter that guesses right about as often as not: copied from the target's last layers."""
    torch.manual_seed(seed)
    model = (model or llama()).to(dtype)
    config = DrafterConfig(layers=2, block_size=block_size, taps=[0, 2], mask_token_id=MASK, init=init)
    shape = drafter_shape(config, model.config.get_text_config(decoder=True))
    target = Target(model, shape.taps)
    drafter = new_drafter(shape, config, target, seed).to(dtype).eval()
    return Toy(target, drafter, target.ends(torch.device("cpu")))


def prompts(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]
