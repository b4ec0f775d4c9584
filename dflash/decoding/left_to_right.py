"""Drafts of a drafter that looks back: slot after slot, each from logits that the draft before it has corrected.

Whether a slot is drafted at all may depend on the drafts before it (confidence), never on its own: so the law of the
emitted text stays the target's.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash.decoding.sampling import Dice, Proposal, Sampling
from dflash.model.drafter import ContextState, Drafter, embed_blocks
from dflash.model.drafter_loss import confidence, slot_logits
from dflash.model.head import Head


def block_states(
    drafter: Drafter, embedding: nn.Module, context: list[ContextState], tokens: list[int], anchors: list[int]
) -> Float[Tensor, "B K-1 H"]:
    """Final states of slots 1..K−1 for one block a row: a token and its position."""
    device, shape = drafter.fc.weight.device, drafter.shape
    first = torch.tensor(tokens, device=device)[:, None]
    embedded = embed_blocks(embedding, first, shape.block_size, shape.mask_token_id, drafter.fc.weight.dtype)
    return drafter.blocks(context, embedded, torch.tensor(anchors, device=device)[:, None])[:, 0, 1:]


def left_to_right(
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    hidden: Float[Tensor, "B K-1 H"],
    tokens: list[int],
    rooms: list[int],
    sampling: Sampling,
    dice: Sequence[Dice],
    least_confidence: float = 0.0,
) -> list[Proposal]:
    """Drafts of each row, at most `rooms` of them, behind its anchor's token."""
    drafts: list[list[int]] = [[] for _ in tokens]
    laws: list[list[Tensor]] = [[] for _ in tokens]
    going = list(range(len(tokens)))
    for slot in range(hidden.shape[1]):
        going = [row for row in going if slot < rooms[row]]
        if going and least_confidence > 0:
            sure = confidence(drafter, ends, hidden[going, slot], _before(tokens, drafts, going, hidden.device))
            if sure is not None:
                going = [row for row, one in zip(going, sure.tolist(), strict=True) if one >= least_confidence]
        if not going:
            break
        previous = _before(tokens, drafts, going, hidden.device)
        for row, logits in zip(going, slot_logits(drafter, ends, hidden[going, slot], previous), strict=True):
            one = sampling.propose(logits[None], dice[row])
            drafts[row] += one.tokens
            if one.law is not None:
                laws[row].append(one.law)
    return [Proposal(tuple(row), _joined(law, sampling, hidden.device)) for row, law in zip(drafts, laws, strict=True)]


def _before(tokens: list[int], drafts: list[list[int]], rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor([drafts[row][-1] if drafts[row] else tokens[row] for row in rows], device=device)


def _joined(laws: list[Tensor], sampling: Sampling, device: torch.device) -> Tensor | None:
    if sampling.temperature == 0.0:
        return None
    return torch.cat(laws) if laws else torch.zeros(0, 1, device=device)
