"""The six arrays of a cache that is being written, filled side by side."""

from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped, UInt8
from numpy import ndarray

from cache.disk.manifest import ARRAYS, ROW_DTYPES, ArrayFacts
from cache.disk.metadata import write_array_metadata
from cache.disk.shard import ShardFile, Submit
from cache.disk.store import chunk_path
from cache.ragged import offsets_of

# Bytes of each half of a double buffer. Rows are few beside tokens.
BUFFER_BYTES = {"ids": 1 << 24, "mask": 1 << 22}
ROW_BUFFER_BYTES = 1 << 18


class ArrayFiles:
    """Files of ids, mask, offsets, split, group and source_row in one directory."""

    def __init__(
        self, directory: Path, dtype: str, *, submit: Submit, direct: bool = True, durable: bool = True
    ) -> None:
        self._directory, self._durable = directory, durable
        self._dtypes = {"ids": dtype, "mask": "uint8", **ROW_DTYPES}
        self._files: dict[str, ShardFile] = {}
        try:
            for name in ARRAYS:
                self._files[name] = ShardFile(
                    directory / chunk_path(name),
                    self._dtypes[name],
                    submit=submit,
                    buffer_bytes=BUFFER_BYTES.get(name, ROW_BUFFER_BYTES),
                    direct=direct and name in BUFFER_BYTES,  # the small files go through the page cache
                )
            self._files["offsets"].write(np.zeros(1, dtype=np.int64))
        except BaseException:
            self.abandon()
            raise

    @property
    def tokens(self) -> int:
        return self._files["ids"].size

    def add(
        self,
        ids: Shaped[ndarray, "T"],
        mask: UInt8[ndarray, "T"],
        lengths: Int64[ndarray, "R"],
        side: UInt8[ndarray, "R"],
        group: Int64[ndarray, "R"],
        source_row: Int64[ndarray, "R"],
        *,
        vocabulary: int,
    ) -> None:
        """Append rows; raises `IdOutOfRange` for an id that is not in 0..vocabulary-1."""
        offsets = offsets_of(lengths)[1:] + self.tokens
        self._files["ids"].write(ids, vocabulary)
        self._files["mask"].write(mask)
        self._files["offsets"].write(offsets)
        self._files["split"].write(side)
        self._files["group"].write(group)
        self._files["source_row"].write(source_row)

    def close(self) -> dict[str, ArrayFacts]:
        """Finish every file and let zarr describe it."""
        facts = {}
        for name, file in self._files.items():
            elements = file.size
            size_bytes, xxh3 = file.close(durable=self._durable)
            metadata = write_array_metadata(self._directory, name, elements, self._dtypes[name])
            facts[name] = ArrayFacts(size_bytes, xxh3, metadata)
        return facts

    def abandon(self) -> None:
        """Let go of the files after a failure."""
        for file in self._files.values():
            file.abandon()
