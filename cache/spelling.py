"""Texts → token ids and the bytes each token stands for, in one call of the tokenizer for a whole batch.

A token's place in its text follows from how many bytes each token spells: a table over the vocabulary and a running sum,
with no list of offsets per token. A text whose tokens do not spell it byte by byte (a normaliser changed it, a special
token took blanks around it) gets its places from the tokenizer's own offsets.
"""

import json
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt32
from numpy import ndarray

from cache.ragged import offsets_of


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of all texts back to back, with the bytes they cover, counted over all texts back to back."""

    ids: UInt32[ndarray, "T"]
    offsets: Int64[ndarray, "N+1"]  # tokens of text i: offsets[i]..offsets[i+1]
    start: Int64[ndarray, "T"]
    end: Int64[ndarray, "T"]
    text_start: Int64[ndarray, "N+1"]  # bytes of text i: text_start[i]..text_start[i+1]


class Speller:
    """Encodes with a `tokenizers.Tokenizer`, whose own threads do the work."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._widths = _widths(backend)

    def encode(self, texts: list[str]) -> Encoded:
        """No special tokens are added: a chat template writes its own."""
        sizes = np.fromiter((len(t) if t.isascii() else len(t.encode()) for t in texts), np.int64, len(texts))
        text_start = offsets_of(sizes)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        offsets = offsets_of(np.fromiter(map(len, encodings), np.int64, len(texts)))
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.uint32, int(offsets[-1]))
        width = self._widths[ids]
        end = np.cumsum(width, dtype=np.int64)
        spelled = np.diff(end[offsets[1:] - 1], prepend=0) if ids.size else sizes
        if (offsets[1:] > offsets[:-1]).all() and (spelled == sizes).all():
            return Encoded(ids, offsets, end - width, end, text_start)
        return self._by_offsets(texts, ids, offsets, text_start)

    def _by_offsets(
        self,
        texts: list[str],
        ids: UInt32[ndarray, "T"],
        offsets: Int64[ndarray, "N+1"],
        text_start: Int64[ndarray, "N+1"],
    ) -> Encoded:
        """The places by the tokenizer's own offsets, which count characters."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        places = np.empty((ids.size, 2), dtype=np.int64)
        for i, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
            if encoding.ids:
                at = np.array(encoding.offsets, dtype=np.int64)
                places[offsets[i] : offsets[i + 1]] = text_start[i] + (at if text.isascii() else byte_places(text)[at])
        return Encoded(ids, offsets, places[:, 0], places[:, 1], text_start)


def byte_places(text: str) -> Int64[ndarray, "C+1"]:
    """The byte at which each character of a text starts, and the number of bytes."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return offsets_of(1 + (points > 0x7F) + (points > 0x7FF).astype(np.int64) + (points > 0xFFFF))


def _widths(backend: Any) -> Int64[ndarray, "V"]:
    """Number of bytes that each token spells; right for byte-level vocabularies and for those with a mark for blanks."""
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
            widths[identity] = len(token.replace("\u2581", " ").encode())
    return widths
