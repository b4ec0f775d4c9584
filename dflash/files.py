"""Directories that are whole or absent: written beside their place, flushed to disk, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from cache.locks import beside

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def durable_directory(final: Path) -> Iterator[Path]:
    """A temporary directory that becomes `final` when the block ends, and is removed when it raises.

    A directory of that name that is already there is replaced.
    """
    partial = beside(final)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in sorted(partial.rglob("*")):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        sync_directory(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        sync_directory(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file; returns the xxh3-128 of its content, made on the way: it is not read again for it.

    The format (https://github.com/huggingface/safetensors#format): 8 bytes with the size of a JSON header, little
    endian; the header, padded to 8 bytes; the tensors' bytes, one behind the other.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb") as stream:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            stream.write(piece)
        for tensor in tensors.values():
            values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            digest.update(values)
            stream.write(values)
    return digest.hexdigest()


def checksum(path: Path) -> str:
    """xxh3-128 of a file's content, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
