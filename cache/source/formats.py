"""What a data file is, told by its first bytes: names lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from cache.errors import BadSource

Format = Literal["arrow file", "arrow stream", "parquet", "jsonl", "json"]  # json: an array, or objects over lines

COMPRESSED = {  # only JSON comes so
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    **{bytes([low, 0x2A, 0x4D, 0x18]): "zstd" for low in range(0x50, 0x60)},  # a skippable frame, as pzstd writes first
}
BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of the source; `indices` are files of an `_indices` mapping over all files of its part."""

    path: Path
    format: Format


class UnknownFormat(BadSource):
    """The first bytes of a file are of none that is read."""


def data_file(path: Path) -> DataFile:
    """The file with its format."""
    try:
        head = _first_bytes(path)
    except FileNotFoundError:
        raise BadSource(
            f"{path}: missing, though the data set names it. Save or download the data set again."
        ) from None
    if head.startswith(b"ARROW1"):
        return DataFile(path, "arrow file")
    if head.startswith(b"\xff\xff\xff\xff"):
        return DataFile(path, "arrow stream")
    if head.startswith(b"PAR1"):
        return DataFile(path, "parquet")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head[:2] in (b"{\0", b"[\0", b"\0{", b"\0["):
        raise BadSource(f"{path}: UTF-16 text, expected UTF-8: iconv -f UTF-16 -t UTF-8 '{path}' > rows.jsonl")
    text = head.removeprefix(BOM).lstrip(_BLANK)
    if text.startswith(b"["):
        return DataFile(path, "json")
    if not text or text.startswith(b"{"):
        return DataFile(path, "json" if text[1:].lstrip(b" \t").startswith((b"\r", b"\n")) else "jsonl")
    raise UnknownFormat(
        f"{path}: starts with {head[:8]!r}, expected an Arrow file or stream, Parquet, or JSON: an object a line, or "
        "an array of them. Write the rows in one of these formats."
    )


def codec_of(path: Path) -> str | None:
    """How the file is compressed; None: it is not."""
    with path.open("rb") as file:
        head = file.read(4)
    return next((codec for magic, codec in COMPRESSED.items() if head.startswith(magic)), None)


def _first_bytes(path: Path) -> bytes:
    """Of what the file holds, unpacked where it is compressed. One that cannot be unpacked counts as lines: reading
    it says what is wrong."""
    codec = codec_of(path)
    if codec is None:
        with path.open("rb") as file:
            return file.read(64)
    try:
        with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, codec) as stream:
            return bytes(stream.read(64))
    except (OSError, pa.ArrowException):
        return b""
