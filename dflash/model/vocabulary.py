"""The ids that a drafter may draft, where these are not all: what it drafts from is then a smaller head.

Text that no drafter proposes costs a draft and never the text: the target emits what it would have emitted anyway.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn

from dflash.model.head import Head

EXCLUDED = -1e4  # added to the logit of an id that is not drafted: far below any other, and a number in float16


class Vocabulary(nn.Module):
    """`ids`, ascending, belong to the drafter and stand in its checkpoints; nothing of it is trained."""

    ids: Int64[Tensor, " n"]

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(size))
        self._whole: Head | None = None
        self._own: Head | None = None

    def head(self, head: Head) -> Head:
        """The rows of the drafted ids, remembered for the head that was asked for last."""
        if self._own is None or self._whole is not head:
            bias = None if head.bias is None else head.bias[self.ids]
            unknown = None if head.unknown is None else head.unknown[self.ids]
            self._whole, self._own = head, replace(head, weight=head.weight[self.ids], bias=bias, unknown=unknown)
        return self._own

    def labels(
        self, labels: Int[Tensor, "*n"], weights: Float[Tensor, "*n"]
    ) -> tuple[Int[Tensor, "*n"], Float[Tensor, "*n"]]:
        """Labels as rows of the smaller head; one that it lacks gets no weight, and row 0."""
        place = torch.searchsorted(self.ids, labels.long()).clamp_(max=self.ids.numel() - 1)
        held = self.ids[place] == labels
        return torch.where(held, place, 0), torch.where(held, weights, 0.0)

    def widened(self, logits: Float[Tensor, "*n k"], size: int) -> Float[Tensor, "*n V"]:
        """Logits of all ids: −∞ where none is drafted."""
        return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, self.ids, logits)

    def tables(
        self, first: Float[Tensor, "V r"], second: Float[Tensor, "V r"]
    ) -> tuple[Float[Tensor, "V s"], Float[Tensor, "V s"]]:
        """A Markov head's tables with one column more, which rules out in a whole head what is not drafted."""
        excluded = second.new_full((second.shape[0], 1), EXCLUDED)
        excluded[self.ids] = 0.0
        return torch.cat([first, torch.ones_like(first[:, :1])], 1), torch.cat([second, excluded], 1)
