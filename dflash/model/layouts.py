"""The two layouts in which drafters are published: config.json from a drafter's shape, read back, checked key by key.

    dflash        config keys of the public checkpoints; the tap of layer i is written i
    speculators   config of the library of that name; the same tap is written i + 1

Both hold the same model.safetensors: the drafter alone. The embedding and the head are the target's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.model.drafter import Drafter, DrafterShape
from dflash.model.part_fields import ARCHITECTURES, part_fields, read_parts, read_sliding, sliding_fields

Layout = Literal["dflash", "speculators"]
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Json = dict[str, Any]

# Trainers and servers count layers differently: the files say how these are counted.
DFLASH_TAPS = "id i: output of decoder layer i = hidden_states[i + 1]; hidden_states[0] is the embedding"
SPECULATORS_TAPS = "id j: hidden_states[j] = output of decoder layer j - 1; hidden_states[0] is the embedding"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a layout says of the target besides the drafter's shape."""

    name: str
    architectures: list[str]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    dtype: str  # of its weights, which the drafter is served in, too: servers turn another one into what they like


def layout_config(layout: Layout, shape: DrafterShape, target: TargetFacts) -> Json:
    """config.json of a layout."""
    return _speculators(shape, target) if layout == "speculators" else _dflash(shape, target)


def _dflash(shape: DrafterShape, target: TargetFacts) -> Json:
    parts = part_fields(shape)
    return {
        "architectures": [ARCHITECTURES[shape.kind]],
        **_layers(shape, target),
        # Older readers look for the block size here, newer ones in dflash_config.
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.taps),
            "target_layer_ids_are": DFLASH_TAPS,
            **(parts if shape.kind == "dflash2" else {}),
        },
        **(parts if shape.kind == "dspark" else {}),
        "num_target_layers": shape.num_target_layers,
    }


def _speculators(shape: DrafterShape, target: TargetFacts) -> Json:
    return {
        "architectures": [ARCHITECTURES[shape.kind]],
        "speculators_model_type": shape.kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layers(shape, target),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "aux_hidden_state_layer_ids_are": SPECULATORS_TAPS,
        "num_target_layers": shape.num_target_layers,
        "mask_token_id": shape.mask_token_id,
        **part_fields(shape),
        "sample_from_anchor": False,  # slot 0 shows the anchor's token and drafts nothing
        # A server takes the first of is_causal and this; vLLM 0.26 and 0.27 know this alone, and false means causal.
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": shape.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": target.architectures},
        },
        "tie_word_embeddings": False,
        "dtype": target.dtype,
    }


def _layers(shape: DrafterShape, target: TargetFacts) -> Json:
    """The drafter's layers, as a Qwen3 config; theta stands where older and newer readers look."""
    rope = dict(shape.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "rope_parameters": dict(shape.rope_parameters),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "is_causal": False,
        **sliding_fields(shape),
        "max_window_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": target.dtype,
    }


def read_config(value: Json) -> DrafterShape:
    """The shape that a config.json of either layout means; keys that only the other level has are found there, too.

    Raises ConfigMismatch for a missing key, or two places that contradict each other.
    """
    speculators = "speculators_model_type" in value
    layers = _need(value, "transformer_layer_config") if speculators else value
    taps = _either(value, "aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    if _either(layers, "is_causal"):
        raise ConfigMismatch("config.json: is_causal is true, expected false: a block's slots see each other.")
    return DrafterShape(
        hidden_size=_need(layers, "hidden_size"),
        intermediate_size=_need(layers, "intermediate_size"),
        num_heads=_need(layers, "num_attention_heads"),
        num_key_value_heads=_need(layers, "num_key_value_heads"),
        head_dim=_need(layers, "head_dim"),
        num_layers=_need(layers, "num_hidden_layers"),
        block_size=_either(value, "block_size"),
        taps=tuple(tap - 1 if speculators else tap for tap in taps),
        num_target_layers=_need(value, "num_target_layers"),
        vocab_size=_need(layers, "vocab_size"),
        mask_token_id=_either(value, "mask_token_id"),
        rms_norm_eps=_need(layers, "rms_norm_eps"),
        max_position_embeddings=_need(layers, "max_position_embeddings"),
        rope_parameters=_rope(layers),
        **read_sliding(layers),
        **read_parts(value),
    )


def check_config(value: Json) -> DrafterShape:
    """`read_config`, and every key that this project writes must be there with the value that the shape gives it."""
    shape = read_config(value)
    speculators = "speculators_model_type" in value
    layers = value["transformer_layer_config"] if speculators else value
    verifier = _need(_need(value, "speculators_config"), "verifier") if speculators else {}
    facts = TargetFacts(
        name=_need(verifier, "name_or_path") if speculators else "",
        architectures=_need(verifier, "architectures") if speculators else [],
        bos_token_id=_need(layers, "bos_token_id"),
        eos_token_id=_need(layers, "eos_token_id"),
        dtype=str(written_dtype(value)).removeprefix("torch."),
    )
    _same(value, layout_config("speculators" if speculators else "dflash", shape, facts), "")
    return shape


def written_dtype(value: Json) -> torch.dtype:
    """The dtype that a config.json gives the drafter's tensors. Raises ConfigMismatch for one that is not written."""
    layers = value["transformer_layer_config"] if "speculators_model_type" in value else value
    dtype = _need(layers, "dtype")
    if dtype not in DTYPES:
        raise ConfigMismatch(f"config.json: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def load_exported(directory: Path) -> Drafter:
    """A drafter from a served layout alone, as a server reads it.

    Raises ConfigMismatch for a missing key or contradicting values, CheckpointCorrupt for missing or extra tensors.
    """
    return read_drafter(json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors"))


def read_drafter(value: Json, tensors: dict[str, Tensor]) -> Drafter:
    """A drafter from the contents of config.json and model.safetensors, computing in float32."""
    shape = check_config(value)
    check_tensors(shape, tensors, written_dtype(value))
    drafter = Drafter(shape)
    drafter.load_state_dict(tensors)
    return drafter.eval()


def load_published(directory: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Shape and tensors of anybody's drafter in either layout, in float32, the target's embedding and head left out.

    Raises ConfigMismatch for a directory or config.json that is none, CheckpointCorrupt where the tensors are others
    than the config means.
    """
    try:
        value = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigMismatch(
            f"drafter.init={directory}: {error}. Name random, target, or a directory with config.json and "
            "model.safetensors of a drafter, such as RUN/export/dflash."
        ) from error
    shape = read_config(value)
    with torch.device("meta"):
        expected = Drafter(shape).state_dict()
    tensors = {name: tensor.float() for name, tensor in tensors.items() if name not in _OF_THE_TARGET}
    wrong = [name for name in expected.keys() & tensors.keys() if expected[name].shape != tensors[name].shape]
    if expected.keys() != tensors.keys() or wrong:
        raise CheckpointCorrupt(
            f"drafter.init={directory}: missing {sorted(expected.keys() - tensors.keys())[:3]}, unexpected "
            f"{sorted(tensors.keys() - expected.keys())[:3]}, of another shape than config.json means {wrong[:3]}."
        )
    return shape, tensors


def check_tensors(shape: DrafterShape, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Raise CheckpointCorrupt for a missing or extra tensor, or one of another shape or dtype."""
    with torch.device("meta"):
        expected = Drafter(shape).state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        raise CheckpointCorrupt(f"model.safetensors: missing {missing}, unexpected {extra}.")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != dtype:
            raise CheckpointCorrupt(
                f"model.safetensors: {name} is {tensor.dtype} {tuple(tensor.shape)}, config.json means "
                f"{dtype} {tuple(expected[name].shape)}."
            )


def _need(value: Json, key: str) -> Any:
    if key not in value:
        raise ConfigMismatch(f"config.json has no {key}. It is not a whole config of a DFlash drafter.")
    return value[key]


def _either(value: Json, key: str) -> Any:
    """A key that readers look for at the top or in dflash_config; both may have it, and must then say the same."""
    found = [place[key] for place in (value, value.get("dflash_config", {})) if key in place]
    if not found:
        raise ConfigMismatch(f"config.json has no {key}, neither at the top nor in dflash_config.")
    if found[0] != found[-1]:
        raise ConfigMismatch(f"config.json: {key} is {found[0]} at the top and {found[-1]} in dflash_config.")
    return found[0]


def _rope(layers: Json) -> Json:
    """Positions from where newer readers look, or older ones; both places must say the same."""
    older = None
    if "rope_theta" in layers:
        older = {"rope_type": "default", **(layers.get("rope_scaling") or {}), "rope_theta": layers["rope_theta"]}
    newer = layers.get("rope_parameters")
    if older is None and newer is None:
        raise ConfigMismatch("config.json has neither rope_parameters nor rope_theta.")
    if older is not None and newer is not None and older != newer:
        raise ConfigMismatch(f"config.json: rope_parameters {newer} contradict rope_theta and rope_scaling {older}.")
    return dict(newer or older or {})


def _same(value: Any, expected: Any, path: str) -> None:
    if isinstance(expected, dict) and isinstance(value, dict):
        for key, one in expected.items():
            if key not in value:
                raise ConfigMismatch(f"config.json has no {path}{key}; expected {one!r}.")
            _same(value[key], one, f"{path}{key}.")
    elif value != expected:
        raise ConfigMismatch(f"config.json: {path[:-1]} is {value!r}, the rest of the config means {expected!r}.")
