"""Tiny random targets and drafters for tests of decoding, evaluation and export: made in milliseconds, float64."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dflash.config import DrafterConfig
from dflash.model.drafter import Drafter, embed_blocks
from dflash.model.head import Head
from dflash.model.part import Part
from dflash.target.frozen import Target, drafter_shape
from dflash.training.initial_drafter import new_drafter

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
            "initializer_range": 0.4,
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
    mask: int = MASK,
    **parts: Any,
) -> Toy:
    """A target and a drafter that guesses right about as often as not: copied from the target's last layers."""
    torch.manual_seed(seed)
    model = (model or llama()).to(dtype)
    config = DrafterConfig(layers=2, block_size=block_size, taps=[0, 2], mask_token_id=mask, init=init, **parts)
    shape = drafter_shape(config, model.config.get_text_config(decoder=True))
    target = Target(model, shape.taps)
    drafter = new_drafter(shape, config, target, seed).to(dtype).eval()
    if parts.get("kind", "dflash") != "dflash":
        stir(drafter, seed)
    return Toy(target, drafter, target.ends(torch.device("cpu")))


def stir(drafter: Drafter, seed: int = 0, std: float = 0.3) -> Drafter:
    """Random numbers in the parts that start at zero, so that they have a say."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in (module for module in drafter.modules() if isinstance(module, Part)):
            for parameter in part.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += (std * noise).to(parameter.dtype)
    return drafter


def prompts(*lengths: int, seed: int = 0) -> list[Tensor]:
    """Random prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]


@cache
def taught(block_size: int = 4) -> Toy:
    """A toy whose drafter has learned the target's greedy text: it accepts anything from no draft to a whole block."""
    made = toy(3, block_size=block_size)
    rows = torch.stack([greedy(made.target, prompt, 40) for prompt in prompts(6, 6, seed=5)])
    features = made.target.features(rows)
    anchors = torch.arange(6, 46 - block_size).expand(len(rows), -1)
    labels = torch.stack([rows[:, 6 + k : 46 - block_size + k] for k in range(block_size)], dim=-1)
    embedding, head = made.ends
    embedded = embed_blocks(embedding, labels[..., 0], block_size, MASK)
    optimizer = torch.optim.Adam(made.drafter.parameters(), lr=4e-3)
    for _ in range(40):
        logits = head.logits(made.drafter(features, embedded, anchors)[:, :, 1:])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 2), labels[:, :, 1:].flatten()).backward()
        optimizer.step()
    return made


LOOKING_BACK: dict[str, dict[str, Any]] = {
    "dflash2": {"kind": "dflash2", "rank": 6},
    "dflash2 free": {"kind": "dflash2", "rank": 6, "tables": "free"},
    "dspark": {"kind": "dspark", "rank": 6},
    "dspark free gated": {"kind": "dspark", "rank": 6, "tables": "free", "markov": "gated"},
    "dspark vocabulary": {"kind": "dspark", "rank": 6, "vocabulary": 17},
    "dspark windows": {"kind": "dspark", "rank": 6, "sliding_window": 5, "sliding_layers": [1]},
}


def looking_back(**parts: Any) -> Toy:
    """`taught`'s drafter with parts that look back, random ones but for a small effect: some drafts stay right."""
    plain = taught()
    made = toy(3, **parts)
    made.drafter.load_state_dict(plain.drafter.state_dict(), strict=False)
    with torch.no_grad():
        for part in (module for module in made.drafter.modules() if isinstance(module, Part)):
            part.start(torch.Generator().manual_seed(0))
    stir(made.drafter, 1, std=0.05)
    return made


def greedy(target: Target, prompt: Tensor, count: int) -> Tensor:
    """A prompt and the target's greedy text behind it, the slow and obvious way: no cache, one token at a time."""
    ids = prompt
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, target.model(ids[None]).logits[0, -1].argmax(-1, keepdim=True)])
    return ids


def save_tokenizer(directory: Path, pre: dict[str, Any] | None = None) -> None:
    """A byte-level BPE of VOCABULARY ids; the last row of the toy's embedding has no token."""
    vocab = {chr(97 + i): i for i in range(4, VOCABULARY - 2)} | {"ef": VOCABULARY - 2}
    special = {"id": STOP, "content": "<end>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree = {
        "version": "1.0",
        "added_tokens": [special | flags],
        "pre_tokenizer": pre
        or {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab | {"<end>": STOP}, "merges": ["e f"]},
    }
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tree))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
