"""The layout `gguf`: drafter.gguf for llama.cpp, and target.gguf where the target was no GGUF file to begin with.

What is written is read back whole: every key and every tensor must be what the trainer has, rounded to the file's type.
"""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dflash.config import ExportConfig, GgufType, TargetConfig
from dflash.errors import CheckpointCorrupt
from dflash.export.gguf_drafter import drafter_keys, drafter_tensors
from dflash.export.gguf_file import Contents, read_gguf, read_keys, rounded, tensor_type, write_gguf
from dflash.export.gguf_target import original_file, target_keys, target_tensors
from dflash.export.gguf_tokenizer import tokenizer_keys
from dflash.model.drafter import Drafter
from dflash.target.tokenizer import tokenizer_directory

DRAFTER, TARGET = "drafter.gguf", "target.gguf"


def gguf_type(export: ExportConfig, target: TargetConfig) -> GgufType:
    """The type of the matrices: as told, else 16 bits of the target's kind."""
    return export.gguf_type or ("bfloat16" if target.dtype == "bfloat16" else "float16")


def write_gguf_layout(
    directory: Path, drafter: Drafter, model: PreTrainedModel, target: TargetConfig, wanted: GgufType
) -> Path | None:
    """The files of the layout, each read back. Returns the file that the target came from; None: target.gguf is there.

    Raises TargetMismatch for a target or positions that llama.cpp was not tried with, ConfigMismatch for a drafter that
    it does not know, CheckpointCorrupt when a file does not hold what was written.
    """
    shape, original = drafter.shape, original_file(target)
    if original is None:
        tokenizer = tokenizer_keys(tokenizer_directory(target), shape.vocab_size, target.model)
        _write(directory / TARGET, target_keys(model, tokenizer), target_tensors(model), wanted)
    else:
        tokenizer = {key: value for key, value in read_keys(original).items() if key.startswith("tokenizer.")}
    _write(directory / DRAFTER, drafter_keys(shape, tokenizer), drafter_tensors(drafter), wanted)
    return original


def _write(file: Path, keys: dict[str, Any], tensors: dict[str, Tensor], wanted: GgufType) -> None:
    write_gguf(file, keys, tensors, wanted)
    refuse_differences(file.name, read_gguf(file), keys, tensors, wanted)


def refuse_differences(
    name: str, contents: Contents, keys: dict[str, Any], tensors: dict[str, Tensor], wanted: GgufType
) -> None:
    """Raise CheckpointCorrupt unless a file holds just these keys and these tensors, rounded as wanted."""
    unlike = [key for key in keys | contents.keys if not _same(contents.keys.get(key), keys.get(key))]
    unlike += [one for one in tensors | contents.tensors if not _holds(contents, one, tensors.get(one), wanted)]
    if unlike:
        raise CheckpointCorrupt(f"{name} does not hold what was written: {unlike[:5]} differ. Nothing was exported.")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-7 * abs(other)  # the file holds float32
    return type(one) is type(other) and bool(one == other)


def _holds(contents: Contents, name: str, tensor: Tensor | None, wanted: GgufType) -> bool:
    written = contents.tensors.get(name)
    if tensor is None or written is None or contents.types[name] != tensor_type(tensor, wanted).name:
        return False
    expected = rounded(tensor, wanted)
    return written.shape == expected.shape and bool((written == expected).all())
