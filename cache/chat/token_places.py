"""Texts → token ids and the bytes that each token stands for, in one call of the tokenizer for a whole batch.

A token's place in its text follows from how many bytes each token spells: a table over the vocabulary and a running
sum, with no list of offsets a token. Where the tokens of a text do not spell it (a normaliser changed it, a special
token took the blanks around it), the places are the tokenizer's own offsets.
"""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int64, UInt32
from numpy import ndarray

from cache.canonical import canonical
from cache.ragged import offsets_of


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of all texts back to back, with the bytes they cover, counted over all texts back to back."""

    ids: UInt32[ndarray, "T"]
    offsets: Int64[ndarray, "ends"]  # tokens of text i: offsets[i]..offsets[i+1]
    start: Int64[ndarray, "T"]
    end: Int64[ndarray, "T"]
    text_start: Int64[ndarray, "ends"]  # bytes of text i: text_start[i]..text_start[i+1]


class Speller:
    """Encodes with a `tokenizers.Tokenizer`, whose own threads do the work."""

    def __init__(self, backend: Any) -> None:
        # A tokenizer may have been saved with a longest text, which would cut rows without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._widths = _widths(backend)
        self._spells = True  # until a batch shows that these tokens mostly do not spell their texts

    @property
    def vocabulary(self) -> int:
        """Number of ids, those of added tokens included."""
        return self._widths.size

    def encode(self, texts: list[list[str]]) -> Encoded:
        """Each text is given in pieces, which are tokenised apart. No special tokens are added."""
        pieces = [piece for text in texts for piece in text]
        sizes = np.fromiter((len(p) if p.isascii() else len(p.encode()) for p in pieces), np.int64, len(pieces))
        piece_start = offsets_of(sizes)
        encode = self._backend.encode_batch_fast if self._spells else self._backend.encode_batch
        encodings = encode(pieces, add_special_tokens=False)
        offsets = offsets_of(np.fromiter(map(len, encodings), np.int64, len(pieces)))
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.uint32, int(offsets[-1]))
        start, end = self._places(pieces, encodings, ids, offsets, piece_start)
        last = offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)))  # pieces → texts
        return Encoded(ids, offsets[last], start, end, piece_start[last])

    def _places(
        self,
        pieces: list[str],
        encodings: list[Any],
        ids: UInt32[ndarray, "T"],
        offsets: Int64[ndarray, "ends"],
        piece_start: Int64[ndarray, "ends"],
    ) -> tuple[Int64[ndarray, "T"], Int64[ndarray, "T"]]:
        """Start and end of each token, in bytes over all pieces."""
        width = self._widths[ids]
        end = np.cumsum(width, dtype=np.int64)
        start = end - width
        spelled = np.diff(np.append(0, end)[offsets])
        odd = np.flatnonzero(spelled != np.diff(piece_start)) if self._spells else np.arange(len(pieces))
        if self._spells and self._backend.normalizer is not None:
            odd = np.union1d(odd, [i for i, piece in enumerate(pieces) if self._is_changed(piece)]).astype(np.int64)
        if not odd.size:
            return start, end
        if self._spells:
            shift = np.repeat(piece_start[:-1] - np.append(0, end)[offsets[:-1]], np.diff(offsets))
            start, end = start + shift, end + shift
            encodings = self._backend.encode_batch([pieces[i] for i in odd], add_special_tokens=False)
            self._spells = 2 * odd.size < len(pieces) or len(pieces) < 16
        for i, encoding in zip(odd.tolist(), encodings, strict=True):
            at = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            places = piece_start[i] + (at if pieces[i].isascii() else byte_places(pieces[i])[at])
            start[offsets[i] : offsets[i + 1]], end[offsets[i] : offsets[i + 1]] = places[:, 0], places[:, 1]
        return start, end

    def _is_changed(self, piece: str) -> bool:
        """Whether the normaliser changes more than blanks; in ASCII text the number of bytes shows that."""
        return not piece.isascii() and self._backend.normalizer.normalize_str(piece).replace(BLANK, " ") != piece


BLANK = "\u2581"  # by which vocabularies that are not byte-level write a blank


def byte_places(text: str) -> Int64[ndarray, "places"]:
    """The byte at which each character of a text starts, and the number of bytes."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return offsets_of(1 + (points > 0x7F) + (points > 0x7FF).astype(np.int64) + (points > 0xFFFF))


def hash_texts(backend: Any) -> str:
    """Of the text of every id of a `tokenizers.Tokenizer`: an id that stands for other words changes it."""
    texts = backend.get_vocab(with_added_tokens=True)
    return xxhash.xxh3_128_hexdigest(canonical(sorted((number, text) for text, number in texts.items())))


def _widths(backend: Any) -> Int64[ndarray, "V"]:
    """Bytes that each token spells, where the vocabulary is byte-level or has a mark for blanks."""
    description = json.loads(backend.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps([description["pre_tokenizer"], description["decoder"]])
    added = {token["id"]: token["content"] for token in description["added_tokens"]}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    widths = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    for token, identity in vocabulary.items():
        if identity in added:
            widths[identity] = len(added[identity].encode())
        elif is_byte_level:
            widths[identity] = len(token)  # its alphabet has one character for each byte
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            widths[identity] = 1
        else:
            widths[identity] = len(token.replace(BLANK, " ").encode())
    return widths
