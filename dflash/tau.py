"""Teacher-forced τ: what greedy speculative decoding would emit a pass, on rows that the target wrote itself.

Start at an answer's first token as anchor, draft, accept the longest prefix that equals the row, move the anchor by
accepted + 1, repeat. On such rows this equals real greedy decoding, and one target pass gives it for a whole row.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from numpy import ndarray
from torch import Tensor, nn

from dflash.anchors import block_counts, block_labels, legal_anchors
from dflash.drafter import Drafter
from dflash.loss import Head
from dflash.trainer import embed_blocks

_SLOTS = 4096  # slots whose hidden states and logits are held at once, at most

CONVENTION = (
    "τ = tokens emitted by a target pass, bonus token included, the pass over the prompt not counted; "
    "greedy drafts, a draft is accepted while all before it in its block are"
)


@dataclass(frozen=True, slots=True)
class RowWalk:
    """The passes over one row's answers."""

    emitted: int
    accepted: tuple[int, ...]  # accepted drafts by pass


@dataclass(frozen=True, slots=True)
class Tau:
    """τ over rows, with the standard error of a ratio of sums over rows."""

    value: float
    standard_error: float


def walk(mask: UInt8[ndarray, " T"], accepted: dict[int, int]) -> RowWalk:
    """Passes over a row, from what each legal anchor would have accepted."""
    supervised = np.concatenate([[0], mask.astype(np.int8), [0]])
    starts, ends = np.flatnonzero(np.diff(supervised) == 1), np.flatnonzero(np.diff(supervised) == -1) - 1
    emitted, by_pass = 0, []
    for position, last in zip(starts.tolist(), ends.tolist(), strict=True):
        while position < last:
            tokens = min(accepted[position] + 1, last - position)
            by_pass.append(accepted[position])
            emitted += tokens
            position += tokens
    return RowWalk(emitted, tuple(by_pass))


def tau(walks: list[RowWalk]) -> Tau:
    """Σ emitted / Σ passes; standard error by the linearised ratio estimator over rows."""
    emitted = np.array([w.emitted for w in walks], dtype=np.float64)
    passes = np.array([len(w.accepted) for w in walks], dtype=np.float64)
    if not passes.sum():
        return Tau(math.nan, math.nan)
    value = emitted.sum() / passes.sum()
    if len(walks) < 2:
        return Tau(float(value), math.nan)
    residual = emitted - value * passes
    error = math.sqrt(len(walks) / (len(walks) - 1) * float((residual**2).sum())) / passes.sum()
    return Tau(float(value), float(error))


def acceptance_by_slot(walks: list[RowWalk], block_size: int) -> list[float]:
    """Share of passes that accepted slot k, for k = 1..K−1."""
    accepted = np.concatenate([np.array(w.accepted, dtype=np.int64) for w in walks]) if walks else np.zeros(0)
    return [float((accepted >= k).mean()) if accepted.size else 0.0 for k in range(1, block_size)]


@torch.no_grad()
def accepted_by_anchor(
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    ids: Int64[ndarray, " T"],
    mask: UInt8[ndarray, " T"],
    features: Float[Tensor, "T N*H"],
) -> dict[int, int]:
    """For every legal anchor of a row, how many drafts equal the row; drafts past the answer's end do not count."""
    embedding, head = ends
    shape, device = drafter.shape, drafter.fc.weight.device
    anchors = np.flatnonzero(legal_anchors(mask))
    labels = block_labels(ids, anchors, shape.block_size)
    counts: Bool[ndarray, "A K"] = block_counts(mask, anchors, shape.block_size)
    context = drafter.context(features[None].to(device))
    result: dict[int, int] = {}
    group = max(1, _SLOTS // shape.block_size)
    for start in range(0, anchors.size, group):
        piece = slice(start, start + group)
        label = torch.from_numpy(labels[piece]).to(device)
        embedded = embed_blocks(embedding, label[:, 0], shape.block_size, shape.mask_token_id)
        anchor = torch.from_numpy(anchors[piece]).to(device)
        hidden = drafter.blocks(context, embedded[None].to(drafter.fc.weight.dtype), anchor[None])[0, :, 1:]
        right = (head.logits(hidden).argmax(-1) == label[:, 1:]).cpu().numpy() & counts[piece, 1:]
        accepted = np.logical_and.accumulate(right, axis=1).sum(axis=1)
        result.update(zip(anchors[piece].tolist(), accepted.tolist(), strict=True))
    return result
