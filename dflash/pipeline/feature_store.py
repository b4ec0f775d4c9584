"""Features of the rows, kept on disk after the first epoch so that later epochs skip the target.

    features/
        values.bin     bfloat16 [T, N·H], rows at the token cache's offsets
        filled.bin     uint8 [R], 1 where a row's features are on disk
        filling.bin    the same as of now, shared by the processes of a machine; begins as filled.bin at every start
        key.json       what the values depend on; another key starts the store anew

A row's features are those that the target gave it in its first pass. Their last bits depend on the rows beside it, so a
row that is filled keeps them, whatever passes it is in later. `filled.bin` is written at checkpoints, after the values.
Processes of one machine map the same files: each fills the rows that it computes, and reads those of all others once
the first epoch is over. Between machines a map is not coherent, so there only a store is read that has been filled.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import BFloat16, Int64
from numpy import ndarray
from torch import Tensor

from cache.json_file import write_json
from dflash.errors import ConfigMismatch


class FeatureStore:
    """Features in files that `FeatureStore.make` has made: the target stage puts and gets, a checkpoint flushes."""

    def __init__(self, directory: Path, offsets: Int64[ndarray, " R+1"], width: int) -> None:
        self._directory = directory
        self._offsets = offsets
        self._values = np.memmap(directory / "values.bin", dtype=np.uint16, mode="r+", shape=(int(offsets[-1]), width))
        self._filled = np.memmap(directory / "filling.bin", dtype=np.uint8, mode="r+", shape=(offsets.size - 1,))

    @staticmethod
    def make(directory: Path, offsets: Int64[ndarray, " R+1"], width: int, key: dict[str, Any]) -> None:
        """Make the store for `key` ready to be opened, empty when there is none for it.

        Raises ConfigMismatch when the disk has no room for what is missing.
        """
        key = json.loads(json.dumps(key))
        size = int(offsets[-1]) * width * 2
        if not _matches(directory, key, size, offsets.size - 1):
            shutil.rmtree(directory, ignore_errors=True)
            free = shutil.disk_usage(directory.parent).free
            if size > free:
                raise ConfigMismatch(
                    f"training.features=reuse needs {size / 1e9:.1f} GB in {directory}, {free / 1e9:.1f} GB are free. "
                    "Free some, set $DFLASH_HOME to a larger disk, or set training.features=stream."
                )
            directory.mkdir(parents=True)
            with (directory / "values.bin").open("wb") as stream:
                # Reserved, not sparse: a full disk would otherwise kill the process at some later write to the map.
                os.posix_fallocate(stream.fileno(), 0, size)
            np.zeros(offsets.size - 1, dtype=np.uint8).tofile(directory / "filled.bin")
            write_json(directory / "key.json", key)
        partial = directory / "filling.bin.tmp"
        shutil.copyfile(directory / "filled.bin", partial)
        partial.replace(directory / "filling.bin")  # another file: a process of an earlier start may have that one

    def has_any(self, row_ids: Int64[ndarray, " B"]) -> bool:
        """Whether some of these rows are filled."""
        return bool(self._filled[row_ids].any())

    def has(self, row_ids: Int64[ndarray, " B"]) -> bool:
        """Whether all of these rows are filled."""
        return bool(self._filled[row_ids].all())

    def put(self, row_ids: Int64[ndarray, " B"], features: BFloat16[Tensor, "B S NH"]) -> None:
        """Keep the features of right-padded rows that are not filled yet."""
        bits = features.detach().cpu().view(torch.uint16).numpy()
        for b, row in enumerate(row_ids):
            if self._filled[row]:
                continue
            start, stop = self._offsets[row], self._offsets[row + 1]
            self._values[start:stop] = bits[b, : stop - start]
        self._filled[row_ids] = 1

    def get(self, row_ids: Int64[ndarray, " B"], padded: int) -> BFloat16[Tensor, "B S NH"]:
        """The features of filled rows, padded on the right with zeros."""
        bits = np.zeros((len(row_ids), padded, self._values.shape[1]), dtype=np.uint16)
        for b, row in enumerate(row_ids):
            start, stop = self._offsets[row], self._offsets[row + 1]
            bits[b, : stop - start] = self._values[start:stop]
        return torch.from_numpy(bits).view(torch.bfloat16)

    def flush(self) -> None:
        """Make what is filled so far durable: values first, then what says that they are there."""
        filled = self._filled.copy()
        self._values.flush()
        partial = self._directory / "filled.bin.tmp"
        with partial.open("wb") as stream:
            filled.tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self._directory / "filled.bin")


def is_complete(
    directory: Path, key: dict[str, Any], offsets: Int64[ndarray, " R+1"], width: int, row_ids: Int64[ndarray, " n"]
) -> bool:
    """Whether the features of all these rows are on disk."""
    if not _matches(directory, json.loads(json.dumps(key)), int(offsets[-1]) * width * 2, offsets.size - 1):
        return False
    return bool(np.fromfile(directory / "filled.bin", dtype=np.uint8)[row_ids].all())


def _matches(directory: Path, key: dict[str, Any], size: int, rows: int) -> bool:
    try:
        return (
            json.loads((directory / "key.json").read_text()) == key
            and (directory / "values.bin").stat().st_size == size
            and (directory / "filled.bin").stat().st_size == rows
        )
    except (OSError, ValueError):
        return False
