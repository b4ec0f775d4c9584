"""GGUF file → a directory of safetensors that every later start maps in a second. Done once per file content."""

import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache.json_file import read_json, write_json
from dflash.errors import TargetMismatch
from dflash.files import durable_directory


def dequantise(file: Path, home: Path) -> Path:
    """Write `file` as float32 safetensors and tokenizer to `home/targets/<sha256 of file>/`, unless that is there.

    Raises TargetMismatch when the file is missing or is not a GGUF that transformers reads.
    """
    if not file.is_file():
        raise TargetMismatch(
            f"target.model={file}: no such file. Name a directory, a hub name or a GGUF file that exists."
        )
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    directory = home / "targets" / digest
    if (directory / "config.json").exists():
        return directory
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, KeyError) as error:
        raise TargetMismatch(f"target.model={file}: transformers cannot read this GGUF file: {error}") from error
    # Saving refuses a model that says it is quantised; after loading it no longer is.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    with durable_directory(directory) as partial:
        model.save_pretrained(partial)
        _say_theta_twice(partial / "config.json")
        tokenizer.save_pretrained(partial)
        source = {"file": file.name, "path": str(file.resolve()), "sha256": digest}
        (partial / "source.json").write_text(json.dumps(source))
    return directory


def _say_theta_twice(file: Path) -> None:
    """Positions where older readers look, too: transformers 4 knows no rope_parameters and takes θ = 10,000."""
    config = read_json(file) or {}
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:
        theta = rope.pop("rope_theta")
        scaling = None if rope.get("rope_type", "default") == "default" else rope
        write_json(file, {**config, "rope_theta": theta, "rope_scaling": scaling})
