"""JSON objects that are no lines → lines: the elements of an array, or objects one after another over several lines.

The text is read in blocks and decoded value by value, so memory is bounded by the longest value. A line end inside a
value stands between its parts, as text in JSON has none, so a blank in its place changes nothing.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cache.errors import BadRow, BadSource
from cache.source.place import Place

AGAIN = "Repair the file, or write or download it again."
LONGEST_WORD = 12  # characters of an escape, a number's end or a constant that a block's end may cut
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(slots=True)
class _Text:
    """The part of the text that is held: from `at` on it is not yet used."""

    blocks: Iterator[bytes]
    decode: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8-sig")("surrogatepass").decode)
    held: str = ""
    at: int = 0
    is_whole: bool = False

    def more(self) -> bool:
        """Read on, as much again as is waiting, so that a long value costs no more than twice its length."""
        waiting = len(self.held) - self.at
        parts = [self.held[self.at :]]
        read = 0
        while not self.is_whole and read <= waiting:
            block = next(self.blocks, b"")
            self.is_whole = not block
            parts.append(self.decode(block, self.is_whole))
            read += len(block)
        self.held, self.at = "".join(parts), 0
        return read > 0

    def shown(self, at: int | None = None) -> str:
        start = self.at if at is None else max(at, self.at)
        return repr(self.held[start : start + 40])

    def next(self) -> str:
        """The next character that is not blank, which is not used yet; empty at the end."""
        while True:
            match = _BLANK.match(self.held, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.held) or not self.more():
                return self.held[self.at : self.at + 1]


def lines_of_values(blocks: Iterable[bytes], place: Place, longest: int) -> Iterator[bytes]:
    """The objects of a file, each as one line. A value longer than `longest` characters is refused."""
    text, decoder = _Text(iter(blocks)), json.JSONDecoder()
    number = 0
    try:
        is_array = text.next() == "["
        text.at += is_array
        while (first := text.next()) not in ("", "]"):
            if number and is_array:
                if first != ",":
                    raise BadRow(f"{place(number)}: {text.shown()}, expected a comma before it. {AGAIN}")
                text.at += 1
                if not (first := text.next()):
                    break
            if first != "{":
                raise BadSource(f"{place(number)}: begins with {text.shown()}, expected an object. {_advice(place)}")
            end = _end(text, decoder, place(number), longest)
            value = text.held[text.at : end].replace("\n", " ").replace("\r", " ")
            yield value.encode("utf-8", "surrogatepass") + b"\n"
            text.at = end
            number += 1
        if is_array and first != "]":
            raise BadRow(f"{place(number)}: missing, the array has no end: the file was cut off. {AGAIN}")
        text.at += is_array
        if text.next():
            raise BadRow(f"{place.file}: {text.shown()} behind its array, expected one array. {_advice(place)}")
    except UnicodeDecodeError as error:
        raise BadRow(f"{place(number)}: not UTF-8 ({error.reason}). {AGAIN}") from None


def _end(text: _Text, decoder: json.JSONDecoder, where: str, longest: int) -> int:
    """Where the value at `text.at` ends, reading on as long as it has no end."""
    while True:
        try:
            return decoder.raw_decode(text.held, text.at)[1]
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated") or error.pos >= len(text.held) - LONGEST_WORD
            if is_cut and len(text.held) - text.at > longest:
                raise BadSource(f"{where}: longer than {longest >> 20} MiB, expected one row. Take it out.") from None
            if not is_cut or not text.more():
                raise BadRow(f"{where}: not JSON ({error.msg}, {text.shown(error.pos - 20)}). {AGAIN}") from None
        except (RecursionError, ValueError) as error:
            raise BadRow(f"{where}: cannot be read as JSON ({str(error)[:80]}). {AGAIN}") from None


def _advice(place: Place) -> str:
    return (
        f"If these are lists of messages: jq -c '{{messages: .}}' '{place.file}' > rows.jsonl; if lists of rows: "
        f"jq -c '.[]' '{place.file}' > rows.jsonl"
    )
