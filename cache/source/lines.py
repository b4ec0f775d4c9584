"""Files of JSON → blocks of whole lines; what is no lines in its file comes as lines, too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cache.errors import BadSource
from cache.source.formats import BOM, DataFile, codec_of
from cache.source.json_values import lines_of_values
from cache.source.place import Place

BLOCK_BYTES = 1 << 22  # text that is parsed at once; a longer line is its own block


MAX_LINE_BYTES = 1 << 26  # of one line: a row of some ten million tokens


@dataclass(frozen=True, slots=True)
class Lines:
    """Neighbouring lines of a file, none of them blank."""

    first: int  # number of the first line, from 0
    count: int
    text: bytes
    position: int  # bytes of the file that were read up to here


def place_of(file: DataFile) -> Place:
    """Names the rows of a file by their number."""
    return Place(str(file.path), 0, lines=file.format == "jsonl", elements=file.format == "json")


def read_rows(
    file: DataFile, block_bytes: int = BLOCK_BYTES, *, start: int = 0, stop: int | None = None, first_line: int = 0
) -> Iterator[Lines]:
    """The rows of a file as lines, also those that are no lines in it; only of lines a part may be read."""
    if file.format == "jsonl":
        yield from read_lines(file.path, block_bytes, start=start, stop=stop, first_line=first_line)
        return
    position = first = size = 0
    held: list[bytes] = []

    def blocks() -> Iterator[bytes]:
        nonlocal position
        for block, at in _blocks(file.path, block_bytes):
            position = at
            yield block

    for line in lines_of_values(blocks(), place_of(file), MAX_LINE_BYTES):
        held.append(line)
        size += len(line)
        if size >= block_bytes:
            yield Lines(first, len(held), b"".join(held), position)
            first, size, held = first + len(held), 0, []
    if held:
        yield Lines(first, len(held), b"".join(held), position)


def read_lines(
    path: Path, block_bytes: int = BLOCK_BYTES, *, start: int = 0, stop: int | None = None, first_line: int = 0
) -> Iterator[Lines]:
    """The file, or its bytes from `start` to `stop`, in blocks of whole lines; blank lines are left out, and end one.

    Where a file is compressed it can only be read from its beginning to its end.
    """
    number, waiting, size = first_line, [b""], 0  # the beginning of a line whose end has not come
    for read, position in _blocks(path, block_bytes, start, stop):
        if size > MAX_LINE_BYTES:
            raise BadSource(
                f"line {number + 1} of {path}: longer than {MAX_LINE_BYTES >> 20} MiB, expected one row a line. "
                "Take it out."
            )
        waiting.append(read)
        size += len(read)
        if read and b"\n" not in read:
            continue
        text = b"".join(waiting)
        if number == 0 and text.startswith(BOM):
            text = text[len(BOM) :]
        end = text.rfind(b"\n") + 1 if read else len(text)
        block, waiting = text[:end], [text[end:]]
        size = len(text) - end
        for first, count, part in _without_blanks(block):
            yield Lines(number + first, count, part, position)
        number += block.count(b"\n")


def _blocks(path: Path, block_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, unpacked, and how far it has been read; a last empty block says that it has ended."""
    with pa.OSFile(str(path)) as file:
        codec = codec_of(path)
        stream = file if codec is None else pa.CompressedInputStream(file, codec)
        left = math.inf if stop is None or codec else stop - start
        if codec is None:
            file.seek(start)
        read = b"?"
        while read:
            try:
                read = stream.read(int(min(block_bytes, left)))
            except OSError as error:
                if error.errno is not None:  # of the system, not of what the file holds
                    raise
                raise BadSource(
                    f"{path}: cannot be read to its end ({error}): it is damaged or was cut off. Download it again."
                ) from None
            left -= len(read)
            yield read, file.tell()


def _without_blanks(block: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Runs of lines that are not blank: number of the first, count, text."""
    count = block.count(b"\n") + (not block.endswith(b"\n") and bool(block))
    if b"\n\n" not in block and b"\n " not in block and b"\n\r" not in block and b"\n\t" not in block:
        if block.strip():  # the usual case: no blank line between; the first may still be one
            lead = len(block) - len(block.lstrip(b"\r\n\t "))
            skipped = block[:lead].count(b"\n")
            yield skipped, count - skipped, block[lead:]
        return
    run: list[bytes] = []
    first = 0
    for number, line in enumerate(block.split(b"\n")):
        if line.strip():
            if not run:
                first = number
            run.append(line)
        elif run:
            yield first, len(run), b"\n".join(run) + b"\n"
            run = []
    if run:
        yield first, len(run), b"\n".join(run) + b"\n"
