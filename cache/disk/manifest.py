"""The manifest: what a token cache says of itself, and the only thing that makes its bytes trustworthy."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import xxhash

from cache.canonical import canonical
from cache.errors import CacheCorrupt, CacheMismatch

MOST_NAMES = 20  # of sources in a manifest
LAYOUT_VERSION = 1
INNER_CHUNK = 1 << 20  # elements of one inner chunk of a shard: what a Zarr reader fetches for one row

# Arrays of a cache, in the order in which they are written; ids has the manifest's dtype.
ROW_DTYPES = {"offsets": "int64", "split": "uint8", "group": "uint16", "source_row": "int64"}
HISTOGRAMS = ("length_histogram", "supervised_shares", "answers_a_row")
ARRAYS = ("ids", "mask", *ROW_DTYPES)


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What the file of one array must be."""

    size_bytes: int
    xxh3: str  # xxh3-64 of the whole file
    metadata_xxh3: str  # of the zarr.json beside it


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a reader needs to know, and to check, without reading a token."""

    layout_version: int
    key: str
    key_parts: dict[str, str]
    rows: int
    tokens: int
    supervised_tokens: int
    answers: int  # runs of supervised tokens
    dtype: str  # of the ids
    vocabulary: int
    arrays: dict[str, ArrayFacts]
    source_rows: int  # rows read
    dropped: dict[str, int]  # reason → rows; reasons that end in _piece count pieces of rows that were kept
    noted: dict[str, int]  # what was changed in conversations without dropping one → how often
    truncated: int  # rows cut at max_tokens
    truncated_tokens: int  # tokens that were cut off
    dropped_tokens: int  # tokens of the rows and pieces that were dropped once they were tokens
    length_histogram: tuple[tuple[int, int], ...]  # (longest length of the bin, rows in it), powers of two
    group_names: list[str]
    # Of conversations; empty where rows came tokenised.
    messages: dict[str, int] = field(default_factory=dict)  # `role: what became of it` → messages
    supervised_shares: tuple[tuple[int, int], ...] = ()  # (tenths of the row that are supervised, at most; rows)
    answers_a_row: tuple[tuple[int, int], ...] = ()  # (answers, rows)
    tokenizer: dict[str, Any] = field(
        default_factory=dict
    )  # stop ids, ids of a probe text, hash of every id's text; empty without a tokenizer
    # What a person asks for; none of it is in the key.
    sources: list[str] = field(default_factory=list)  # as they were named
    files: int = 0  # of the source that were read
    files_left_out: int = 0  # in its directories, as they are no data of the split: the build's log names them
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries that tokenised

    def dtypes(self) -> dict[str, str]:
        return {"ids": self.dtype, "mask": "uint8", **ROW_DTYPES}

    def sizes(self) -> dict[str, int]:
        """Number of elements of each array."""
        of_rows = dict.fromkeys(ROW_DTYPES, self.rows)
        return {"ids": self.tokens, "mask": self.tokens, **of_rows, "offsets": self.rows + 1}

    @property
    def dropped_share(self) -> float:
        """Share of the rows that a rule dropped; rows of other groups were not asked for, so they do not count."""
        lost = sum(n for reason, n in self.dropped.items() if reason != "other_group" and not reason.endswith("_piece"))
        return lost / max(1, self.source_rows - self.dropped.get("other_group", 0))

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for name in HISTOGRAMS:
            content[name] = [list(pair) for pair in content[name]]
        return content | {"checksum": checksum(content)}

    @classmethod
    def from_json(cls, content: dict[str, Any], path: str = "the manifest") -> "Manifest":
        """Read back what `to_json` made; refuses other layouts and changed content."""
        version = content.get("layout_version")
        if version != LAYOUT_VERSION:
            raise CacheMismatch(
                f"{path}: layout version {version!r}, expected {LAYOUT_VERSION}. "
                "The cache was written by another version of this program: prepare the rows again."
            )
        body = {one.name: content[one.name] for one in fields(cls) if one.name in content}
        if content.get("checksum") != checksum(body):
            raise CacheCorrupt(
                f"{path}: the manifest's checksum is {checksum(body)}, expected {content.get('checksum')}. "
                "The file was changed or damaged: remove the cache and prepare the rows again."
            )
        body["arrays"] = {name: ArrayFacts(**facts) for name, facts in body["arrays"].items()}
        for name in HISTOGRAMS:
            body[name] = tuple((int(top), int(rows)) for top, rows in body.get(name, ()))
        return cls(**body)


def few(names: list[str]) -> list[str]:
    """At most `MOST_NAMES` of them, and how many others there are."""
    others = len(names) - MOST_NAMES
    return names if others <= 0 else [*names[:MOST_NAMES], f"and {others:,} others"]


def checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(canonical(content))


def dtype_for(vocabulary: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The narrowest dtype that holds every id below `vocabulary`."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
