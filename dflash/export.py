"""One checkpoint → the layout that servers load: config.json and model.safetensors of a `DFlashDraftModel`.

Nothing appears under the final name before a fresh process has loaded it and its logits are the trainer's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash import checkpoint
from dflash.drafter import Drafter, DrafterShape
from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.files import durable_directory, write_json
from dflash.loss import Head
from dflash.run import Progress, RunDirectory
from dflash.target import Target, drafter_shape, text_config
from dflash.training import load_drafter

TOLERANCE = 1e-5  # float32 logits, the same weights in two processes


def export(path: Path) -> None:
    """Write RUN/export/dflash/ (or export.path/dflash) from the newest checkpoint, and export.json.

    Raises CheckpointCorrupt without a checkpoint or when what was written does not give the trainer's logits.
    """
    run = RunDirectory(path)
    config = run.config()
    found = checkpoint.newest(run.checkpoints)
    if found is None:
        raise CheckpointCorrupt(f"{run.checkpoints} holds no checkpoint. Train the run first.")
    target = text_config(config.target)
    shape = drafter_shape(config.drafter, target)
    base = Path(config.export.path) if config.export.path else path / "export"
    progress = Progress(run, "export", 3, "parts")
    drafter = load_drafter(shape, found).eval()
    cpu = torch.device("cpu")
    _, head = Target.load(config.target.model_copy(update={"dtype": "float32"}), shape.taps, cpu).ends(cpu)
    final = base / "dflash"
    with durable_directory(final) as partial:
        save_file({k: v.contiguous() for k, v in drafter.state_dict().items()}, partial / "model.safetensors")
        write_json(partial / "config.json", layout_config(shape, target))
        progress.advance("written")
        difference = _gate(drafter, head, partial)
        progress.advance("loaded back")
    size = sum(file.stat().st_size for file in final.iterdir())
    value = {
        "path": str(final),
        "layout": "dflash",
        "checkpoint": str(found.path),
        "max_logit_difference": difference,
        "tensors": len(drafter.state_dict()),
        "size_bytes": size,
    }
    run.write("export.json", value)
    progress.advance("done")


def layout_config(shape: DrafterShape, target: Any) -> dict[str, Any]:
    """config.json as the public checkpoints have it; theta stands where older and newer readers look."""
    rope = dict(shape.rope_parameters)
    theta = rope.pop("rope_theta")
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)},
        "num_target_layers": shape.num_target_layers,
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
        "rope_scaling": scaling,
        "rope_parameters": shape.rope_parameters,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "is_causal": False,
        "layer_types": ["full_attention"] * shape.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(target, "bos_token_id", None),
        "eos_token_id": getattr(target, "eos_token_id", None),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "float32",
    }


def load_exported(directory: Path) -> Drafter:
    """A drafter from the served layout alone, as a server reads it.

    Raises ConfigMismatch for a missing key or contradicting values, CheckpointCorrupt for missing or extra tensors.
    """
    value = json.loads((directory / "config.json").read_text())
    try:
        block = value["dflash_config"]
        shape = DrafterShape(
            hidden_size=value["hidden_size"],
            intermediate_size=value["intermediate_size"],
            num_heads=value["num_attention_heads"],
            num_key_value_heads=value["num_key_value_heads"],
            head_dim=value["head_dim"],
            num_layers=value["num_hidden_layers"],
            block_size=value["block_size"],
            taps=tuple(block["target_layer_ids"]),
            num_target_layers=value["num_target_layers"],
            vocab_size=value["vocab_size"],
            mask_token_id=block["mask_token_id"],
            rms_norm_eps=value["rms_norm_eps"],
            max_position_embeddings=value["max_position_embeddings"],
            rope_parameters=_rope(value),
        )
    except KeyError as error:
        raise ConfigMismatch(f"{directory / 'config.json'} has no {error}. It is not a whole DFlash config.") from error
    drafter = Drafter(shape)
    tensors = load_file(directory / "model.safetensors")
    missing, extra = drafter.state_dict().keys() - tensors.keys(), tensors.keys() - drafter.state_dict().keys()
    if missing or extra:
        raise CheckpointCorrupt(
            f"{directory / 'model.safetensors'}: missing {sorted(missing)}, unexpected {sorted(extra)}."
        )
    drafter.load_state_dict(tensors)
    return drafter.eval()


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Positions from where older readers look; where newer ones look must say the same."""
    rope = {"rope_type": "default", **(value["rope_scaling"] or {}), "rope_theta": value["rope_theta"]}
    if "rope_parameters" in value and dict(value["rope_parameters"]) != rope:
        raise ConfigMismatch(
            f"rope_parameters {value['rope_parameters']} contradict rope_theta and rope_scaling {rope}."
        )
    return rope


def probe(drafter: Drafter) -> Tensor:
    """Final hidden states of seeded inputs, the same in every process."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 24, len(shape.taps) * shape.hidden_size, generator=generator)
    embedded = torch.randn(1, 3, shape.block_size, shape.hidden_size, generator=generator)
    with torch.no_grad():
        hidden: Tensor = drafter(features, embedded, torch.tensor([[3, 11, 24]]))
    return hidden


def _gate(drafter: Drafter, head: Head, directory: Path) -> float:
    """Largest difference of logits between the trainer's drafter and what a fresh process loads from `directory`."""
    out = directory / "probe.safetensors"
    command = [sys.executable, "-m", "dflash", "probe", str(directory), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckpointCorrupt(f"a fresh process could not load the exported drafter: {done.stderr[-2000:]}")
    difference = float((head.logits(load_file(out)["hidden"]) - head.logits(probe(drafter))).abs().max())
    out.unlink()
    if not difference <= TOLERANCE:
        raise CheckpointCorrupt(
            f"the exported drafter differs from the trainer's by {difference:.2e}, expected at most {TOLERANCE:.0e}. "
            "Nothing was exported."
        )
    return difference
