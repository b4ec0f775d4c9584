"""The loss of a drafter of any kind: base loss, what its head that looks back adds, and the confidence head's."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dflash.model.drafter import Drafter
from dflash.model.head import Head, at_least_float32
from dflash.model.look_back import Ends, Slots, previous_tokens
from dflash.model.loss import BlockLoss, block_loss


def drafter_loss(
    drafter: Drafter, embedding: nn.Module, head: Head, hidden: Float[Tensor, "B A K H"], slots: Slots
) -> BlockLoss:
    """Σ w·loss of the counted slots; the token before each slot is the row's own."""
    part = drafter.look_back
    if part is None:
        return block_loss(hidden, head, slots.labels, slots.weights, slots.kind, slots.states, slots.counted)
    read = part.read(previous_tokens(slots.labels), embedding)
    if drafter.vocabulary is not None:
        labels, weights = drafter.vocabulary.labels(slots.labels, slots.weights)
        head, slots = drafter.vocabulary.head(head), replace(slots, labels=labels, weights=weights)
    loss = part.loss(hidden, read, Ends(embedding, head, drafter.norm.weight), slots)
    if drafter.confidence_head is None or loss.distance is None or loss.slot_weight is None:
        return loss
    guess = drafter.confidence_head(*(t.flatten(0, 2)[slots.counted] for t in (hidden, read)))
    guess = guess.to(at_least_float32(guess.dtype))
    accepted = (1 - loss.distance / 2).to(guess.dtype)
    error = F.binary_cross_entropy_with_logits(guess, accepted, reduction="none")
    return replace(loss, total=loss.total + (error * loss.slot_weight).sum())


def slot_logits(
    drafter: Drafter, ends: tuple[nn.Module, Head], hidden: Float[Tensor, "n H"], previous: Tensor
) -> Float[Tensor, "n V"]:
    """The logits that slots are drafted from, given the token before each."""
    part = drafter.look_back
    if part is None:
        return ends[1].logits(hidden)
    if drafter.vocabulary is None:
        return part.logits(hidden, previous, Ends(*ends, drafter.norm.weight))
    own = drafter.vocabulary.head(ends[1])
    logits = part.logits(hidden, previous, Ends(ends[0], own, drafter.norm.weight))
    return drafter.vocabulary.widened(logits, ends[1].weight.shape[0])


def confidence(
    drafter: Drafter, ends: tuple[nn.Module, Head], hidden: Float[Tensor, "n H"], previous: Tensor
) -> Float[Tensor, " n"] | None:
    """How likely each slot's draft is accepted, given the token before it; None without a head that says so."""
    if drafter.confidence_head is None or drafter.look_back is None:
        return None
    return torch.sigmoid(drafter.confidence_head(hidden, drafter.look_back.read(previous, ends[0])))
