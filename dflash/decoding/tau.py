"""Teacher-forced τ: what greedy speculative decoding would emit a pass, on rows that the target wrote itself.

Start at an answer's first token as anchor, draft, accept the longest prefix that equals the row, move the anchor by
accepted + 1, repeat. On such rows this equals real greedy decoding, and one target pass gives it for a whole row.

Drafts are made at every legal anchor at once, not only where the walk comes by: one large product costs less than the
walk's many small ones. The head, the dearest part, runs slot by slot, and only for anchors that are right so far.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from numpy import ndarray
from torch import Tensor, nn

from cache.batches.gather import Buffers, gather
from cache.batches.passes import PassRoom, cut_passes
from cache.disk.store import TokenCache
from dflash.anchors import block_counts, block_labels, legal_anchors
from dflash.model.drafter import ContextState, Drafter, embed_blocks
from dflash.model.drafter_loss import slot_logits
from dflash.model.head import Head
from dflash.target.frozen import Target

_ROOM = PassRoom(tokens=1 << 10, slots=0)  # of one target pass: short rows together, a long one alone
_SLOTS = 1 << 15  # slots whose final hidden states are held at once, about
_LOGITS = 1 << 26  # logits held at once, in elements: 256 MiB in float32

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


def walk_rows(
    store: TokenCache,
    row_ids: Int64[ndarray, " R"],
    target: Target,
    ends: tuple[nn.Module, Head],
    drafters: Sequence[Drafter],
    *,
    on_row: Callable[[], None] = lambda: None,
) -> list[list[RowWalk]]:
    """The passes over each row, for each drafter; one target pass over a few rows serves them all."""
    lengths = store.lengths
    buffers = Buffers(max(_ROOM.tokens, int(lengths.max())))
    found: list[dict[int, RowWalk]] = [{} for _ in drafters]
    for ids in cut_passes(row_ids, lengths, np.zeros_like(lengths), _ROOM):
        rows = gather(store, ids, buffers)
        features = target.features(torch.from_numpy(rows.ids).to(target.device))
        pieces = [(rows.ids[b, :length], rows.mask[b, :length]) for b, length in enumerate(rows.lengths.tolist())]
        for drafter, walks in zip(drafters, found, strict=True):
            accepted = accepted_by_anchor(drafter, ends, pieces, features)
            for row, (_, mask), by_anchor in zip(ids.tolist(), pieces, accepted, strict=True):
                walks[row] = walk(mask, by_anchor)
        for _ in pieces:
            on_row()
    return [[walks[row] for row in row_ids.tolist()] for walks in found]


@torch.no_grad()
def accepted_by_anchor(
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    rows: Sequence[tuple[Int64[ndarray, " T"], UInt8[ndarray, " T"]]],
    features: Float[Tensor, "B S N*H"],
) -> list[dict[int, int]]:
    """For every legal anchor of each row (ids, mask), how many drafts equal the row, up to the answer's end."""
    embedding = ends[0]
    shape, device, dtype = drafter.shape, drafter.fc.weight.device, drafter.fc.weight.dtype
    context = drafter.context(features.to(device))
    group = max(1, _SLOTS // shape.block_size)
    places: list[tuple[int, Int64[ndarray, " A"]]] = []
    drafted: list[Tensor] = []
    labels: list[ndarray] = []
    counts: list[Bool[ndarray, "A K"]] = []
    result: list[dict[int, int]] = [{} for _ in rows]

    def finish() -> None:
        """Compare what has been drafted so far; the head runs over the anchors of many rows at once."""
        if not places:
            return
        accepted = _accepted(drafter, ends, torch.cat(drafted), np.concatenate(labels), np.concatenate(counts))
        start = 0
        for b, anchors in places:
            result[b].update(zip(anchors.tolist(), accepted[start : start + anchors.size].tolist(), strict=True))
            start += anchors.size
        for pending in (places, drafted, labels, counts):
            pending.clear()

    for b, (ids, mask) in enumerate(rows):
        alone = [ContextState(state.key[b : b + 1], state.value[b : b + 1]) for state in context]
        anchors = np.flatnonzero(legal_anchors(mask))
        for start in range(0, anchors.size, group):
            piece = anchors[start : start + group]
            label = block_labels(ids, piece, shape.block_size)
            tokens = torch.from_numpy(label[:, 0]).to(device)
            embedded = embed_blocks(embedding, tokens, shape.block_size, shape.mask_token_id, dtype)
            anchor = torch.from_numpy(piece).to(device)
            hidden = drafter.blocks(alone, embedded[None], anchor[None])
            places.append((b, piece))
            drafted.append(hidden[0, :, 1:])
            labels.append(label)
            counts.append(block_counts(mask, piece, shape.block_size)[:, 1:])
            if sum(one.shape[0] for one in drafted) >= group:
                finish()
    finish()
    return result


def _accepted(
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    hidden: Float[Tensor, "A K-1 H"],
    labels: ndarray,
    counts: Bool[ndarray, "A K-1"],
) -> Int64[ndarray, " A"]:
    """Slots 1, 2, … that equal their labels, up to the first that does not.

    A slot is drafted only while all before it are right: the draft that it looks back at is the label before its own.
    """
    label, counted = torch.from_numpy(labels).to(hidden.device), torch.from_numpy(counts).to(hidden.device)
    accepted = torch.zeros(hidden.shape[0], dtype=torch.long, device=hidden.device)
    chunk = max(1, _LOGITS // ends[1].weight.shape[0])
    for slot in range(hidden.shape[1]):
        going = torch.nonzero((accepted == slot) & counted[:, slot]).squeeze(1)
        if not going.numel():
            break
        for piece in torch.split(going, chunk):
            logits = slot_logits(drafter, ends, hidden[piece, slot], label[piece, slot].long())
            right = logits.argmax(-1) == label[piece, slot + 1]
            accepted[piece] += right.long()
    return accepted.cpu().numpy()
