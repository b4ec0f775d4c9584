"""Speculative decoding: the drafter proposes a block, one target pass checks it, what it accepts is emitted.

    prompts ─▶ target: first token, features ─▶ [ drafter: K−1 drafts ─▶ target: accept, one more token ] …

Several prompts go through a pass together, each accepting as many drafts as it may. Both caches hold confirmed
positions only: all tokens but the last one emitted, which is the next block's anchor.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from dflash.decoding.left_to_right import block_states, left_to_right
from dflash.decoding.rollback import RowCache, room
from dflash.decoding.sampling import Dice, Proposal, Sampling, SeededDice
from dflash.model.drafter import ContextState, Drafter
from dflash.model.head import Head
from dflash.target.frozen import Target

_FLOAT32_TIE = 1e-3  # float32 sums in another order differ by about this much in a logit
_TIE_ULPS = 4  # units in the last place of the best logit, for dtypes in which these are larger
_TIED = 8  # ids that are looked at: with coarse logits more than two may be equal


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Where an answer ends: behind its first stop token, or after so many tokens, or at the target's last position."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Emission:
    """What a target pass gave one row: accepted drafts, then the target's own token unless the answer ended before."""

    row: int
    ids: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer. Passes are those after the prompt's own, which gave the first token."""

    ids: tuple[int, ...]
    emitted: tuple[int, ...]  # tokens by pass: accepted drafts and the bonus token
    accepted: tuple[int, ...]  # drafts that were accepted, by pass
    seconds: float  # of the whole batch that it was decoded in
    ties: tuple[frozenset[int], ...] = ()  # by token, ids that rounding could have made the best; plain decoding only

    @property
    def tau(self) -> float:
        """Mean tokens emitted by a target pass, bonus token included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")


def plain(target: Target, prompt: Int[Tensor, " S"], limits: DecodeLimits, sampling: Sampling, dice: Dice) -> Decoded:
    """The target alone, one token a pass."""
    start = time.perf_counter()
    end = room(target, prompt, limits.max_new_tokens)
    cache = DynamicCache(config=target.model.config)
    ids: list[int] = []
    best: list[tuple[Tensor, Tensor]] = []
    pending = prompt
    while len(ids) < end and not (ids and ids[-1] in limits.stop_ids):
        logits, _ = target.forward(pending[None].to(target.device), cache, logits_to_keep=1)
        ids.append(int(sampling.choose(logits[0, -1:], dice)))
        values, tokens = logits[0, -1].topk(min(_TIED, logits.shape[-1]))
        best.append((values, tokens))
        pending = torch.tensor(ids[-1:])
    seconds = time.perf_counter() - start
    passes = len(ids) - 1
    ties = tuple(tied(values, tokens) for values, tokens in best)
    return Decoded(tuple(ids), (1,) * passes, (0,) * passes, seconds, ties)


def tied(values: Float[Tensor, " n"], tokens: Int[Tensor, " n"]) -> frozenset[int]:
    """Ids of descending logits that lie so close to the best one that rounding decides between them.

    Sums in another order differ by units in the last place of the logit: by 2⁻⁷ of it each in bfloat16, so a fixed
    bound for float32 would call every parting of bfloat16 texts a difference. A token further away is a real one.
    """
    best = values[0].item()
    bound = max(_FLOAT32_TIE, _TIE_ULPS * torch.finfo(values.dtype).eps * abs(best))
    return frozenset(tokens[values >= best - bound].tolist())


def speculate(
    target: Target,
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    prompts: Sequence[Int[Tensor, " S"]],
    limits: DecodeLimits,
    sampling: Sampling,
    dice: Sequence[Dice],
    confidence: float = 0.0,
) -> list[Decoded]:
    """Decode prompts with the drafter's help; `dice` has one for each.

    Where the drafter has a confidence head, a block's drafts end before the first slot that it gives less.
    """
    start = time.perf_counter()
    ids: list[list[int]] = [[] for _ in prompts]
    passes: list[list[Emission]] = [[] for _ in prompts]
    for emissions in stream(target, drafter, ends, prompts, limits, sampling, dice, confidence):
        for emission in emissions:
            if ids[emission.row]:
                passes[emission.row].append(emission)
            ids[emission.row] += emission.ids
    seconds = time.perf_counter() - start
    return [
        Decoded(tuple(row), tuple(len(e.ids) for e in given), tuple(e.accepted for e in given), seconds)
        for row, given in zip(ids, passes, strict=True)
    ]


@dataclass(slots=True)
class Row:
    """An answer under way. The position of its last token is that of the next anchor."""

    index: int
    anchor: int
    last: int
    room: int  # tokens that may follow
    dice: Dice
    proposal: Proposal = field(default_factory=lambda: Proposal((), None))


@torch.no_grad()
def stream(
    target: Target,
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    prompts: Sequence[Int[Tensor, " S"]],
    limits: DecodeLimits,
    sampling: Sampling,
    dice: Sequence[Dice],
    confidence: float = 0.0,
) -> Iterator[list[Emission]]:
    """After every target pass, what each unfinished row got from it: first one token each, then runs of 1 to K.

    Raises ConfigMismatch for a prompt without room, TargetMismatch for a target whose cache cannot be cropped.
    """
    rooms = [room(target, prompt, limits.max_new_tokens) for prompt in prompts]
    cache = RowCache(target, list(prompts))
    logits, features = cache.prefill()
    context = Context(drafter, len(prompts), features.shape[1] + max(rooms) + drafter.shape.block_size)
    context.write(features, torch.zeros(len(prompts), dtype=torch.long))
    rows = []
    for index, (prompt, left) in enumerate(zip(prompts, rooms, strict=True)):
        first = int(sampling.choose(logits[index][None], dice[index]))
        rows.append(Row(index, prompt.numel(), first, left - 1, dice[index]))
    yield [Emission(row.index, (row.last,), 0) for row in rows]
    while rows := _unfinished(rows, limits, cache, context):
        propose(drafter, ends, context.states, rows, sampling, confidence)
        width = max(len(row.proposal.tokens) for row in rows)
        padded = [[row.last, *row.proposal.tokens] + [0] * (width - len(row.proposal.tokens)) for row in rows]
        logits, features = cache.extend(torch.tensor(padded, device=target.device))
        context.write(features, torch.tensor([row.anchor for row in rows]))
        emissions = [_accept(row, logits[b], limits, sampling) for b, row in enumerate(rows)]
        cache.keep([len(emission.ids) for emission in emissions], width + 1)
        yield emissions


def propose(
    drafter: Drafter,
    ends: tuple[nn.Module, Head],
    context: list[ContextState],
    rows: list[Row],
    sampling: Sampling,
    confidence: float,
) -> None:
    """Give every row its drafts. One near its end is checked only as far as it may go."""
    tokens, anchors = [row.last for row in rows], [row.anchor for row in rows]
    if drafter.look_back is None:  # slots do not see each other's drafts: all at once
        for row, slots in zip(rows, draft_logits(drafter, ends, context, tokens, anchors), strict=True):
            row.proposal = sampling.propose(slots[: row.room], row.dice)
        return
    hidden = block_states(drafter, ends[0], context, tokens, anchors)
    rooms, dice = [row.room for row in rows], [row.dice for row in rows]
    for row, proposal in zip(
        rows, left_to_right(drafter, ends, hidden, tokens, rooms, sampling, dice, confidence), strict=True
    ):
        row.proposal = proposal


def _accept(row: Row, logits: Float[Tensor, "n V"], limits: DecodeLimits, sampling: Sampling) -> Emission:
    """Move a row on by its accepted drafts and the token after them, as far as a stop token or its end."""
    count = len(row.proposal.tokens)
    accepted, token = sampling.verify(logits[: count + 1], row.proposal, row.dice)
    new = [*row.proposal.tokens[:accepted], token][: row.room]
    stop = next((i for i, one in enumerate(new) if one in limits.stop_ids), len(new) - 1)
    new = new[: stop + 1]
    row.anchor, row.last, row.room = row.anchor + len(new), new[-1], row.room - len(new)
    return Emission(row.index, tuple(new), min(accepted, len(new)))


def _unfinished(rows: list[Row], limits: DecodeLimits, cache: RowCache, context: "Context") -> list[Row]:
    going = [b for b, row in enumerate(rows) if row.room > 0 and row.last not in limits.stop_ids]
    if going and len(going) < len(rows):
        cache.select(going)
        context.select(going)
    return [rows[b] for b in going]


class Context:
    """The drafter's keys and values by position, for rows of unequal length.

    A pass writes all of its columns; those behind the accepted ones lie at or after the next anchor, where no block
    sees them, and the next pass writes over them.
    """

    def __init__(self, drafter: Drafter, rows: int, positions: int) -> None:
        shape, weight = drafter.shape, drafter.fc.weight
        size = (rows, positions, shape.num_key_value_heads, shape.head_dim)
        self._drafter = drafter
        self.states = [ContextState(weight.new_zeros(size), weight.new_zeros(size)) for _ in range(shape.num_layers)]

    def write(self, features: Float[Tensor, "B n N*H"], start: Int[Tensor, " B"]) -> None:
        """Put features of positions start, start+1, … of each row in their places."""
        device = self._drafter.fc.weight.device
        start = start.to(device)
        rows = torch.arange(features.shape[0], device=device)[:, None]
        positions = start[:, None] + torch.arange(features.shape[1], device=device)
        for state, new in zip(self.states, self._drafter.context(features.to(device), start), strict=True):
            state.key[rows, positions] = new.key
            state.value[rows, positions] = new.value

    def select(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        self.states = [ContextState(state.key[rows], state.value[rows]) for state in self.states]


def draft_logits(
    drafter: Drafter, ends: tuple[nn.Module, Head], context: list[ContextState], tokens: list[int], anchors: list[int]
) -> Float[Tensor, "B K-1 V"]:
    """The head's logits of slots 1..K−1 for one block a row, a token and its position: without looking back."""
    return ends[1].logits(block_states(drafter, ends[0], context, tokens, anchors))


def seeded(seed: int, count: int, device: torch.device) -> list[SeededDice]:
    """Dice for prompts 0, 1, …: the same for a prompt whatever others are decoded."""
    return [SeededDice(seed + index, device) for index in range(count)]
