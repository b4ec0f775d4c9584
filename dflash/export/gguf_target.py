"""The target as a GGUF file, where it was none to begin with: Llama and Qwen3, by llama.cpp's published keys and names.

Llama's queries and keys are permuted, because llama.cpp turns neighbouring pairs for that architecture and transformers
the two halves of a head (`permute` of llama.cpp's own converter). Qwen3 is half-split in both.
"""

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from cache.json_file import read_json
from dflash.config import TargetConfig
from dflash.errors import TargetMismatch
from dflash.export.gguf_drafter import rope_keys

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def original_file(target: TargetConfig) -> Path | None:
    """The GGUF file that a target was made from, where it still is as it was."""
    source = read_json(Path(target.model) / "source.json") or {}
    file = Path(source.get("path", ""))
    if not source.get("path") or not file.is_file():
        return None
    with file.open("rb") as stream:
        is_same = hashlib.file_digest(stream, "sha256").hexdigest() == source["sha256"]
    return file if is_same else None


def target_keys(model: PreTrainedModel, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """All keys of the file. Raises TargetMismatch for an architecture that is not one of ours to prove."""
    config = model.config
    kind = config.model_type
    if kind not in ("llama", "qwen3") or getattr(config, "layer_types", None) not in (
        None,
        ["full_attention"] * config.num_hidden_layers,
    ):
        raise TargetMismatch(
            f"export.layouts: gguf writes targets of Llama and Qwen3 with full attention, this one is {kind}. Convert "
            "it with llama.cpp, python convert_hf_to_gguf.py TARGET, and train with that file as target.model."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "general.architecture": kind,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.dimension_count": head_dim,
        **rope_keys(kind, config.rope_parameters),
        f"{kind}.vocab_size": config.vocab_size,
        **tokenizer,
    }


def target_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors under llama.cpp's names. Raises TargetMismatch for one that has no name there."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module == "lm_head" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding
        theirs = _OUTER.get(module)
        if module.startswith("model.layers."):
            index, _, inner = module.removeprefix("model.layers.").partition(".")
            theirs = None if inner not in _LAYER else f"blk.{index}.{_LAYER[inner]}"
        if theirs is None or kind != "weight":
            raise TargetMismatch(
                f"export.layouts: gguf has no name for the target's {name}. Convert it with llama.cpp, "
                "python convert_hf_to_gguf.py TARGET, and train with that file as target.model."
            )
        if config.model_type == "llama" and theirs.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if theirs.endswith("attn_q") else config.num_key_value_heads
            tensor = _permuted(tensor, heads)
        found[f"{theirs}.weight"] = tensor
    return found


def _permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from two halves to neighbouring pairs."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
