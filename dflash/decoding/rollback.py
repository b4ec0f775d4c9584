"""The target's key/value cache for rows of unequal length, and how rejected drafts leave it.

Rows are aligned at their ends: `[padding | confirmed positions]`. A pass appends the same number of columns to every
row; then each row keeps the first few of them. Rows that keep fewer than the most are rolled to the right, so that what
they do not keep becomes padding at their left, and the columns that no row keeps are cropped.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.target.frozen import Target


class RowCache:
    """Confirmed positions only, once `keep` has been called after a pass."""

    def __init__(self, target: Target, prompts: list[Int[Tensor, " S"]]) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.model.config)
        self._prompts = [prompt.to(target.device) for prompt in prompts]
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=target.device)
        self._columns = 0
        self._last_position = max_positions(target) - 1
        if len(prompts) > 1:  # a window layer must not drop what a short row still needs before it is rolled
            self._cache.activate_past_recording()

    def prefill(self) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B S N*H"]]:
        """The pass over the prompts: logits after each, and features, padded on the right.

        Raises TargetMismatch when rejected drafts could not be removed from this target's cache.
        """
        lengths = [prompt.numel() for prompt in self._prompts]
        ids = torch.nn.utils.rnn.pad_sequence(self._prompts, batch_first=True)
        # No mask: the target is causal and the padding comes last, so no real position sees it.
        ends = torch.tensor(sorted({length - 1 for length in lengths}), device=ids.device)
        logits, features = self._target.forward(ids, self._cache, logits_to_keep=ends)
        self._refuse_states(len(lengths))
        self._cache.activate_past_recording()
        last = torch.tensor(lengths, device=ids.device)
        at = torch.searchsorted(ends, last - 1)
        self._columns = ids.shape[1]
        self.keep(lengths, ids.shape[1])
        return logits[torch.arange(len(lengths), device=ids.device), at], features

    def extend(self, ids: Int[Tensor, "B n"]) -> tuple[Float[Tensor, "B n V"], Float[Tensor, "B n N*H"]]:
        """A pass over new tokens behind each row's confirmed positions."""
        inputs: dict[str, Tensor] = {}
        padding = self._columns - self.lengths
        if ids.shape[0] > 1 or bool(padding.any()):
            columns = torch.arange(self._columns + ids.shape[1], device=ids.device)
            inputs["attention_mask"] = (columns >= padding[:, None]).long()
            positions = self.lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
            inputs["position_ids"] = positions.clamp(max=self._last_position)  # past it lies only what is not kept
        logits, features = self._target.forward(ids, self._cache, **inputs)
        self._columns += ids.shape[1]
        return logits, features

    def keep(self, counts: list[int], of: int) -> None:
        """Confirm the first `counts[b]` of the last pass's `of` columns of each row; the others are gone."""
        most = max(counts)
        shift = torch.tensor([most - count for count in counts], device=self.lengths.device)
        if bool(shift.any()):
            for layer in self._cache.layers:
                if layer.is_initialized:
                    layer.keys = _rolled(layer.keys, shift, of - most)
                    layer.values = _rolled(layer.values, shift, of - most)
        self._cache.crop(most - of)  # a negative number removes that many columns; 0 tidies window layers
        self._columns -= of - most
        self.lengths = self.lengths + torch.tensor(counts, device=self.lengths.device)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, device=self.lengths.device)
        self._cache.batch_select_indices(index)
        self.lengths = self.lengths[index]

    def _refuse_states(self, rows: int) -> None:
        kinds = sorted({type(layer).__name__ for layer in self._cache.layers if not _can_roll(layer)})
        if not self._cache.is_croppable or (rows > 1 and kinds):
            raise TargetMismatch(
                f"{type(self._target.model).__name__} keeps states that rejected drafts cannot be removed from "
                f"({', '.join(kinds) or type(self._cache).__name__}); expected keys and values of attention layers. "
                f"Speculative decoding {'of several prompts at once ' if self._cache.is_croppable else ''}"
                "would change its text; decode with the target alone."
            )


def max_positions(target: Target) -> int:
    """Positions that the target has; very many when its config names no end."""
    return int(getattr(target.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 40)


def room(target: Target, prompt: Int[Tensor, " S"], max_new_tokens: int) -> int:
    """Tokens that may follow a prompt. Raises ConfigMismatch when there is no prompt, or no position after it."""
    positions = max_positions(target)
    if not 0 < prompt.numel() < positions:
        raise ConfigMismatch(
            f"a prompt has {prompt.numel()} tokens, the target {positions} positions; expected at least one token and "
            "one free position. Cut the prompt, or drop it."
        )
    return min(max_new_tokens, positions - prompt.numel())


def _can_roll(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer)


def _rolled(states: Float[Tensor, "B G C D"], shift: Int[Tensor, " B"], rest: int) -> Float[Tensor, "B G C D"]:
    """Each row's columns, except the last `rest`, rolled to the right by its shift."""
    columns = states.shape[2] - rest
    source = (torch.arange(columns, device=states.device) - shift[:, None]) % columns
    index = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return torch.cat([states[:, :, :columns].gather(2, index), states[:, :, columns:]], dim=2)
