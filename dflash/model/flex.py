"""Block attention by flex attention, for GPUs: which tiles a slot may see, a rule inside them, few compiled forms.

Slots and columns are padded to whole tiles, and the rule reads tensors only, so that one compiled form serves every
size of pass. Another one is compiled for a single row, another without gradients and another for a window. One more
than Dynamo's limit is an error: past it stands flex attention's eager form, which holds all scores at once.

    columns   context, padded │ slots of all blocks, padded
    a slot    sees the context before its anchor, and the columns of its own block
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
_BACKEND = "inductor"


@dataclass(frozen=True, slots=True)
class Window:
    """What a sliding layer sees: keys fewer than `size` positions away; `causal`: in a block no later slot."""

    size: int
    causal: bool = False


@dataclass(frozen=True, slots=True)
class FlexMask:
    """The mask of one pass, and how many slots and context columns it has with their padding."""

    blocks: BlockMask
    slots: int
    context: int


def flex_mask(anchor: Int[Tensor, "B A"], context: int, block_size: int, window: Window | None = None) -> FlexMask:
    """The mask of blocks of `block_size` slots at ascending anchors, over a context of `context` positions."""
    count = anchor.shape[1] * block_size
    slots, columns = max(2 * TILE, padded(count)), padded(context)  # sizes of 1 are compiled anew, also of tiles
    slot_block = torch.arange(slots, device=anchor.device) // block_size
    column_block = torch.cat([slot_block.new_full((columns,), -1), slot_block])
    start = anchor.new_zeros(anchor.shape[0], slots)  # slots of no block see themselves alone
    start[:, :count] = anchor.repeat_interleave(block_size, dim=1)
    rule = _rule(slot_block, column_block, start, block_size, window)
    partly, wholly = _tiles(start, slot_block, columns, block_size, window)
    blocks = BlockMask.from_kv_blocks(*_ordered(partly), *_ordered(wholly), TILE, rule, (slots, columns + slots))
    return FlexMask(blocks, slots, columns)


def flex_block_attention(
    query: Float[Tensor, "B A K Q D"],
    context_key: Float[Tensor, "B S G D"],
    context_value: Float[Tensor, "B S G D"],
    block_key: Float[Tensor, "B A K G D"],
    block_value: Float[Tensor, "B A K G D"],
    mask: FlexMask,
) -> Float[Tensor, "B A K Q D"]:
    """`block_attention` by one kernel that skips tiles that nobody sees."""

    def columns(context: Tensor, block: Tensor) -> Tensor:
        slots = block.flatten(1, 2)
        return torch.cat([*_filled(context, mask.context), *_filled(slots, mask.slots)], dim=1).transpose(1, 2)

    slots = torch.cat(_filled(query.flatten(1, 2), mask.slots), dim=1).transpose(1, 2)
    gqa = query.shape[3] != block_key.shape[3]
    with torch.autocast(query.device.type, enabled=False):  # all are of its dtype; its state would be another form
        out = _compiled()(
            slots,
            columns(context_key, block_key),
            columns(context_value, block_value),
            block_mask=mask.blocks,
            enable_gqa=gqa,
        )
    taken: Tensor = out[:, :, : query.shape[1] * query.shape[2]].transpose(1, 2)
    return taken.reshape(query.shape)


def num_compiles() -> int:
    """Forms that were compiled in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def padded(size: int) -> int:
    """Up to whole tiles."""
    return -(-size // TILE) * TILE


@cache
def _compiled() -> Callable[..., Any]:
    torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal once need not be always
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=_BACKEND)
    return compiled


def _rule(
    slot_block: Int[Tensor, " slots"],
    column_block: Int[Tensor, " columns"],
    start: Int[Tensor, "B slots"],
    block_size: int,
    window: Window | None,
) -> Callable[..., Tensor]:
    """The mask by element, over tensors alone: numbers would be compiled in."""

    def whole(b: Tensor, h: Tensor, slot: Tensor, column: Tensor) -> Tensor:
        block = column_block[column]
        return (block == slot_block[slot]) | ((block < 0) & (column < start[b, slot]))

    if window is None:
        return whole
    slots = start.shape[1]
    position = start + torch.arange(slots, device=start.device) % block_size
    context = torch.arange(column_block.numel() - slots, device=start.device)
    column_position = torch.cat([context.expand(start.shape[0], -1), position], dim=1)
    size = start.new_full((), window.size)  # made there: a copy from the host would wait for the device

    def near(b: Tensor, h: Tensor, slot: Tensor, column: Tensor) -> Tensor:
        distance = position[b, slot] - column_position[b, column]
        return whole(b, h, slot, column) & (distance < size) & (distance > -size)

    def near_before(b: Tensor, h: Tensor, slot: Tensor, column: Tensor) -> Tensor:
        distance = position[b, slot] - column_position[b, column]
        return whole(b, h, slot, column) & (distance < size) & (distance >= 0)

    return near_before if window.causal else near


def _tiles(
    start: Int[Tensor, "B slots"],
    slot_block: Int[Tensor, " slots"],
    context: int,
    block_size: int,
    window: Window | None,
) -> tuple[Bool[Tensor, "B 1 rows columns"], Bool[Tensor, "B 1 rows columns"]]:
    """Tiles of which some is seen, where the rule decides, and tiles of which all is seen."""
    by_tile = start.view(start.shape[0], -1, TILE)
    least, most = (by_tile.amin(2)[..., None], by_tile.amax(2)[..., None])
    begin = torch.arange(0, context, TILE, device=start.device)
    some, every = begin < most, begin + TILE <= least
    if window is not None:  # the furthest that any slot of the tile sees, and the furthest that all see
        some &= begin + TILE - 1 > least - window.size
        every &= begin > most + block_size - 1 - window.size
    blocks = slot_block.view(-1, TILE)
    first, last = blocks[:, 0], blocks[:, -1]
    own = (first[:, None] <= last) & (first <= last[:, None])
    partly = torch.cat([some & ~every, own.expand(start.shape[0], -1, -1)], dim=2)
    wholly = torch.cat([every, torch.zeros_like(own).expand(start.shape[0], -1, -1)], dim=2)
    return partly[:, None], wholly[:, None]


def _ordered(tiles: Bool[Tensor, "B 1 rows columns"]) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles has, and these before all others."""
    ordered = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), ordered.to(torch.int32).contiguous()


def _filled(x: Tensor, size: int) -> list[Tensor]:
    """`x [B,n,…]` and zeros up to `size`."""
    missing = size - x.shape[1]
    return [x, x.new_zeros(x.shape[0], missing, *x.shape[2:])] if missing else [x]
