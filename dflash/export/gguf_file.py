"""GGUF files: keys and tensors in, keys and tensors out. The format is llama.cpp's; what is in it is decided elsewhere.

Matrices are rounded to one type; what has one dimension stays float32, as llama.cpp expects of norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from dflash.config import GgufType
from dflash.errors import ConfigMismatch

_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_WRITER_KEYS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a GGUF file says: keys with plain values, tensors as their type's name and values in float32."""

    keys: dict[str, Any]
    types: dict[str, str]
    tensors: dict[str, Tensor]


def tensor_type(tensor: Tensor, wanted: GgufType) -> gguf.GGMLQuantizationType:
    """The type that a tensor is written in: matrices as wanted, but blocks of q8_0 are 32 wide."""
    if tensor.dim() != 2:  # norms and convolutions are added and multiplied element by element
        return gguf.GGMLQuantizationType.F32
    if wanted == "q8_0" and tensor.shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    return _TYPES[wanted]


def rounded(tensor: Tensor, wanted: GgufType) -> Tensor:
    """The values that a reader gets of a tensor, in float32."""
    kind = tensor_type(tensor, wanted)
    return torch.from_numpy(gguf.quants.dequantize(_quantised(tensor, kind), kind).reshape(tensor.shape).copy())


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], wanted: GgufType) -> None:
    """Write `keys` (`general.architecture` among them) and `tensors`.

    Raises ConfigMismatch for a value that float16 cannot hold.
    """
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    for key, value in keys.items():
        if key != "general.architecture":  # the writer has said it
            kind, inner = _value_type(value)
            writer.add_key_value(key, value, kind, inner)
    for name, tensor in tensors.items():
        kind = tensor_type(tensor, wanted)
        if kind == gguf.GGMLQuantizationType.F16 and float(tensor.abs().max()) > _FLOAT16_MAX:
            raise ConfigMismatch(
                f"export.gguf_type: {name} holds {float(tensor.abs().max()):.4g}, more than float16 can. "
                "Set export.gguf_type=bfloat16 or float32."
            )
        writer.add_tensor(name, _quantised(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> Contents:
    """All that is in a file."""
    reader = gguf.GGUFReader(path)
    types, tensors = {}, {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        types[tensor.name] = tensor.tensor_type.name
        tensors[tensor.name] = torch.from_numpy(np.array(values, dtype=np.float32))
    return Contents(read_keys(path), types, tensors)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a file, without its tensors."""
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if name not in _WRITER_KEYS}


def _quantised(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> ndarray:
    values = tensor.detach().to(torch.float32).contiguous().numpy()
    quantised: ndarray = gguf.quants.quantize(values, kind)
    return quantised


def _value_type(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        inner = _value_type(value[0])[0]
        return kinds.ARRAY, kinds.INT32 if inner == kinds.UINT32 else inner
    kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
    return kind, None
