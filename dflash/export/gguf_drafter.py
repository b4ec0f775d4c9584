"""The drafter as a GGUF file for llama.cpp (architecture `dflash`): its shape as keys, its tensors under their names.

llama.cpp's `target_layers` name the layer whose *input* is read: tap i is written i + 1. The embedding and the head are
the target's, which is loaded beside it. Rope is half-split in both, so no weight is permuted.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.config import GgufType
from dflash.errors import CheckpointCorrupt, ConfigMismatch, TargetMismatch
from dflash.export.gguf_file import Contents, read_gguf, rounded
from dflash.model.convolution import GROUP, TAPS
from dflash.model.drafter import Drafter, DrafterShape

_OUTER = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
_INNER = {
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


_CONVOLUTIONS = {"attention_conv": "attn_conv", "mlp_conv": "ffn_conv"}
_TABLES = {
    "dflash": {},
    "dflash2": {
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
    },
    "dspark": {
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
    },
}


def tensor_names(shape: DrafterShape) -> dict[str, str]:
    """llama.cpp's name of every tensor, by ours."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _OUTER.items()} | _TABLES[shape.kind]
    for i in range(shape.num_layers):
        names |= {f"layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight" for ours, theirs in _INNER.items()}
        for ours, theirs in _CONVOLUTIONS.items() if shape.kind == "dflash2" else ():
            names[f"layers.{i}.{ours}.base_kernel"] = f"blk.{i}.{theirs}_base"
            names[f"layers.{i}.{ours}.kernel_projection.weight"] = f"blk.{i}.{theirs}_proj.weight"
    return names


def part_keys(shape: DrafterShape) -> dict[str, Any]:
    """The keys of a kind's parts; llama.cpp takes the rank of a Markov head from its tensors, we from a key."""
    if shape.kind == "dflash2":
        return {
            "dflash.conv_kernel_size": TAPS,
            "dflash.conv_group_size": GROUP,
            "dflash.selector_rank": shape.rank,
            "dflash.selector_top_k": shape.candidates,
        }
    return {"dflash.markov_rank": shape.rank} if shape.kind == "dspark" else {}


def read_parts(keys: dict[str, Any]) -> dict[str, Any]:
    """Fields of a DrafterShape, from those keys."""
    if "dflash.selector_rank" in keys:
        rank, candidates = keys["dflash.selector_rank"], keys.get("dflash.selector_top_k", 0)
        return {"kind": "dflash2", "rank": rank, "candidates": candidates, "tables": "free"}
    if "dflash.markov_rank" in keys:
        return {"kind": "dspark", "rank": keys["dflash.markov_rank"], "tables": "free"}
    return {}


def drafter_keys(shape: DrafterShape, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """All keys of the file. `tokenizer` are the target's.

    Raises TargetMismatch for positions that llama.cpp's `dflash` is not known to turn as we do.
    """
    return {
        "general.architecture": "dflash",
        "general.name": "DFlash drafter",
        "dflash.block_count": shape.num_layers,
        "dflash.context_length": shape.max_position_embeddings,
        "dflash.embedding_length": shape.hidden_size,
        "dflash.feed_forward_length": shape.intermediate_size,
        "dflash.attention.head_count": shape.num_heads,
        "dflash.attention.head_count_kv": shape.num_key_value_heads,
        "dflash.attention.key_length": shape.head_dim,
        "dflash.attention.value_length": shape.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": float(shape.rms_norm_eps),
        "dflash.attention.causal": False,
        "dflash.rope.dimension_count": shape.head_dim,
        **rope_keys("dflash", shape.rope_parameters),
        "dflash.vocab_size": shape.vocab_size,
        "dflash.block_size": shape.block_size,
        "dflash.sample_from_anchor": False,  # true, and the key's absence, mean that slot 0 predicts
        "dflash.target_layers": [tap + 1 for tap in shape.taps],
        **part_keys(shape),
        **tokenizer,
        "tokenizer.ggml.mask_token_id": shape.mask_token_id,
    }


def rope_keys(architecture: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Positions as llama.cpp writes them. Raises TargetMismatch for kinds that were not tried with it."""
    kind = rope.get("rope_type", "default")
    keys: dict[str, Any] = {f"{architecture}.rope.freq_base": float(rope["rope_theta"])}
    if kind == "linear":
        return keys | {
            f"{architecture}.rope.scaling.type": "linear",
            f"{architecture}.rope.scaling.factor": float(rope["factor"]),
        }
    if kind != "default":
        raise TargetMismatch(
            f"export.layouts: gguf knows positions of type default and linear, this target has {kind}; llama.cpp has "
            "other keys for it that were not tried with a drafter. Export the dflash layout, and convert it with "
            "llama.cpp: python convert_hf_to_gguf.py RUN/export/dflash --target-model-dir TARGET"
        )
    return keys


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors under llama.cpp's names. Raises ConfigMismatch for one that has no name there."""
    names, tensors = tensor_names(drafter.shape), drafter.state_dict()
    if unknown := sorted(tensors.keys() - names.keys()):
        raise ConfigMismatch(f"export.layouts: gguf has no name for {unknown[:3]} of this kind of drafter.")
    return {names[name]: tensor for name, tensor in tensors.items()}


def read_shape(keys: dict[str, Any], num_target_layers: int = 0) -> DrafterShape:
    """The shape that the keys mean; the file does not say how many layers the target has.

    Raises ConfigMismatch for a key that is missing, or that says something else than is written for this shape.
    """

    def need(key: str) -> Any:
        if key not in keys:
            raise ConfigMismatch(f"drafter.gguf has no {key}.")
        return keys[key]

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(need("dflash.rope.freq_base"))}
    if "dflash.rope.scaling.type" in keys or "dflash.rope.scaling.factor" in keys:
        kind, factor = need("dflash.rope.scaling.type"), need("dflash.rope.scaling.factor")
        rope = {"rope_type": kind, "factor": factor, "rope_theta": rope["rope_theta"]}
    shape = DrafterShape(
        hidden_size=need("dflash.embedding_length"),
        intermediate_size=need("dflash.feed_forward_length"),
        num_heads=need("dflash.attention.head_count"),
        num_key_value_heads=need("dflash.attention.head_count_kv"),
        head_dim=need("dflash.attention.key_length"),
        num_layers=need("dflash.block_count"),
        block_size=need("dflash.block_size"),
        taps=tuple(layer - 1 for layer in need("dflash.target_layers")),
        num_target_layers=num_target_layers,
        vocab_size=need("dflash.vocab_size"),
        mask_token_id=need("tokenizer.ggml.mask_token_id"),
        rms_norm_eps=need("dflash.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=need("dflash.context_length"),
        rope_parameters=rope,
        **read_parts(keys),
    )
    for key, value in drafter_keys(shape, {}).items():
        if need(key) != value:
            raise ConfigMismatch(f"drafter.gguf: {key} is {keys[key]!r}, the rest of the file means {value!r}.")
    return shape


def drafter_of(contents: Contents) -> Drafter:
    """A drafter from a file's contents alone, computing in float32.

    Raises ConfigMismatch for a wrong key, CheckpointCorrupt for a missing, extra or misshapen tensor.
    """
    drafter = Drafter(read_shape(contents.keys))
    expected = drafter_tensors(drafter)
    missing, extra = expected.keys() - contents.tensors.keys(), contents.tensors.keys() - expected.keys()
    common = expected.keys() & contents.tensors.keys()
    wrong = [name for name in common if expected[name].shape != contents.tensors[name].shape]
    if missing or extra or wrong:
        raise CheckpointCorrupt(
            f"drafter.gguf: missing {sorted(missing)}, unexpected {sorted(extra)}, of another shape {sorted(wrong)}."
        )
    drafter.load_state_dict({ours: contents.tensors[theirs] for ours, theirs in tensor_names(drafter.shape).items()})
    return drafter.eval()


def load_gguf_drafter(path: Path) -> Drafter:
    """A drafter from a GGUF file alone; raises what `drafter_of` does."""
    return drafter_of(read_gguf(path))


def rounded_drafter(drafter: Drafter, wanted: GgufType) -> Drafter:
    """The trainer's drafter with its weights as the file holds them."""
    copy = Drafter(drafter.shape)
    copy.load_state_dict({name: rounded(tensor, wanted) for name, tensor in drafter.state_dict().items()})
    return copy.eval()
