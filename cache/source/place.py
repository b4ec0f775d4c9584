"""Where a row stands in its file, as errors name it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from cache.errors import BadSource


@dataclass(frozen=True, slots=True)
class Place:
    """Where the first row of a chunk stands, to name a row in an error."""

    file: str
    first_row: int
    lines: bool = False  # rows are lines, which people count from 1
    elements: bool = False  # of a JSON array

    @property
    def are_json(self) -> bool:
        """Whether what rows hold beside token ids came as JSON text."""
        return self.lines or self.elements

    def __call__(self, row: int) -> str:
        return (
            f"line {self.first_row + row + 1} of {self.file}"
            if self.lines
            else f"row {self.first_row + row} of {self.file}"
        )


@contextlib.contextmanager
def reading(file: object) -> Iterator[None]:
    """Adds the file's name, once, to what libraries raise without one while they read it."""
    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        what = " ".join(str(error).split())[:300]
        raise BadSource(
            f"{file}: cannot be read, it is damaged or cut short ({what}). Write or download it again."
        ) from error
