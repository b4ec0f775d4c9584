"""The k largest logits of each slot, exact over any cut into tiles; of equal ones, those with the lowest ids."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_GROUP = 16  # columns whose largest logit stands for them at first: sorting all of them would cost more than the head


class Candidates:
    """The best of the tiles so far, `[n, k]`, ordered by falling logit, equal ones by rising id."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._best: tuple[Tensor, Tensor] | None = None

    def add(self, logits: Float[Tensor, "n columns"], start: int) -> None:
        """Look at the columns start, start+1, … of the vocabulary; tiles come in their order."""
        values, ids = _largest(logits, self._count)
        ids = ids + start
        if self._best is not None:
            values, ids = torch.cat([self._best[0], values], dim=1), torch.cat([self._best[1], ids], dim=1)
        values, order = values.sort(dim=1, descending=True, stable=True)
        self._best = values[:, : self._count], ids.gather(1, order)[:, : self._count]

    def by_id(self) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Logits and ids, ids rising: the first of equal scores is then the one with the lowest id."""
        assert self._best is not None
        ids, order = self._best[1].sort(dim=1)
        return self._best[0].gather(1, order), ids


class Collected:
    """The candidates of slots that are taken piece by piece."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[Candidates] = []

    def piece(self) -> Candidates:
        """Those of the next piece of the slots."""
        self._pieces.append(Candidates(self._count))
        return self._pieces[-1]

    def by_id(self) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]] | None:
        """Logits and ids of all of them; None without a slot."""
        if not self._pieces:
            return None
        values, ids = zip(*(piece.by_id() for piece in self._pieces), strict=True)
        return torch.cat(values), torch.cat(ids)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of a tile lie in the `count` groups with the largest maxima, earlier groups first among equals."""
    padded = F.pad(logits, (0, -logits.shape[1] % _GROUP), value=-torch.inf)
    groups = padded.view(padded.shape[0], -1, _GROUP)
    order = groups.amax(-1).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :count].sort(dim=1).values
    values = groups.gather(1, chosen[..., None].expand(-1, -1, _GROUP)).flatten(1)
    ids = (chosen[..., None] * _GROUP + torch.arange(_GROUP, device=logits.device)).flatten(1)
    # Columns of the padding have the highest ids, so they come last even among −∞.
    values, order = values.sort(dim=1, descending=True, stable=True)
    keep = min(count, logits.shape[1])
    return values[:, :keep], ids.gather(1, order)[:, :keep]
