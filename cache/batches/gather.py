"""The rows of a pass as padded arrays, in leased buffers: slice copies only, no torch operation, no allocation.

One copy a row and array is the fastest way there is in numpy (a fancy index costs five times as much), and torch's
own threads would make it slower on a loaded host. Padding is on the right, with 0.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, UInt8
from numpy import ndarray

from cache.disk.store import TokenCache


class Buffers:
    """Leased memory for one batch; whoever leases it hands it to `gather` again only after its last reader is done.

    B·S up to `capacity_tokens` fits. `ids` may lie in memory of the caller's own, such as page-locked memory.
    """

    __slots__ = ("capacity_tokens", "ids", "mask")

    def __init__(self, capacity_tokens: int, ids: Int32[ndarray, "C"] | None = None) -> None:
        self.capacity_tokens = capacity_tokens
        self.ids = np.empty(capacity_tokens, dtype=np.int32) if ids is None else ids
        self.mask = np.empty(capacity_tokens, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of one batch, padded right with 0: views of the leased buffers."""

    ids: Int32[ndarray, "B S"]
    mask: UInt8[ndarray, "B S"]
    lengths: Int32[ndarray, "B"]


def gather(store: TokenCache, row_ids: Int64[ndarray, "B"], out: Buffers) -> Gathered:
    """Copy rows into `out`."""
    starts, stops = store.offsets[row_ids], store.offsets[row_ids + 1]
    lengths = (stops - starts).astype(np.int32)
    num_rows, longest = row_ids.size, int(lengths.max(initial=0))
    if num_rows * longest > out.capacity_tokens:
        raise ValueError(
            f"a batch of {num_rows} rows padded to {longest} tokens needs {num_rows * longest} tokens, the buffers "
            f"hold {out.capacity_tokens}. Lease Buffers of max(tokens of a pass, longest row)."
        )
    ids = out.ids[: num_rows * longest].reshape(num_rows, longest)
    mask = out.mask[: num_rows * longest].reshape(num_rows, longest)
    # Ids are below 2³¹, so wide ones are int32 already, and copying them needs no conversion.
    all_ids, all_mask = store.ids.view(np.int32) if store.ids.itemsize == 4 else store.ids, store.mask
    spans = zip(ids, mask, starts.tolist(), stops.tolist(), lengths.tolist(), strict=True)
    for to_ids, to_mask, start, stop, length in spans:
        to_ids[:length] = all_ids[start:stop]
        to_ids[length:] = 0
        to_mask[:length] = all_mask[start:stop]
        to_mask[length:] = 0
    return Gathered(ids, mask, lengths)


def prefetch(store: TokenCache, row_ids: Int64[ndarray, "B"]) -> None:
    """Ask the kernel to read these rows now: a cold batch then waits for the disk once, not once a page."""
    store.will_need(store.offsets[row_ids], store.offsets[row_ids + 1])
