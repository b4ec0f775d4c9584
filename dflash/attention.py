"""Block attention: every slot sees the context before its anchor and its own block, both directions, nothing else.

A block needs S + K columns, never S + A·K, and of the context only what lies before its anchor. So anchors are taken in
ascending order in groups of a few: one attention call a group, over the context up to its last anchor and its blocks.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Anchors that share one call. More: fewer calls, but each pays for blocks and context that it may not see.
_GROUP = 8


def block_attention(
    query: Float[Tensor, "B A K Q D"],
    context_key: Float[Tensor, "B S G D"],
    context_value: Float[Tensor, "B S G D"],
    block_key: Float[Tensor, "B A K G D"],
    block_value: Float[Tensor, "B A K G D"],
    anchor: Int[Tensor, "B A"],
) -> Float[Tensor, "B A K Q D"]:
    """Attention of A blocks of K slots a row; Q query heads share G key/value heads (Q a multiple of G).

    `anchor` is ascending in each row; context positions ≥ anchor are invisible. Scores are scaled by 1/√D.
    """
    rows = [
        _row_attention(
            query[b], context_key[b], context_value[b], block_key[b], block_value[b], anchor[b], anchor[b].tolist()
        )
        for b in range(query.shape[0])
    ]
    return torch.stack(rows)


def visible(anchor: Int[Tensor, " A"], context: int, block_size: int) -> Bool[Tensor, "A*K context+A*K"]:
    """The mask as a matrix: which of the context and block columns each slot of one row sees."""
    anchors = anchor.numel()
    block = torch.arange(anchors, device=anchor.device).repeat_interleave(block_size)
    before = torch.arange(context, device=anchor.device)[None, :] < anchor.repeat_interleave(block_size)[:, None]
    return torch.cat([before, block[:, None] == block[None, :]], dim=1)


def _row_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    anchor: Tensor,
    positions: list[int],
) -> Tensor:
    anchors, slots, heads, width = query.shape
    shared = heads // block_key.shape[2]
    outputs = []
    for start in range(0, anchors, _GROUP):
        stop = min(start + _GROUP, anchors)
        context = positions[stop - 1]
        mask = visible(anchor[start:stop], context, slots)
        # The query heads of one key head are laid one after another along the query axis: no key is copied for them.
        q = query[start:stop].reshape(-1, block_key.shape[2], shared, width).permute(1, 2, 0, 3).flatten(1, 2)
        k = torch.cat([context_key[:context], block_key[start:stop].flatten(0, 1)]).transpose(0, 1)
        v = torch.cat([context_value[:context], block_value[start:stop].flatten(0, 1)]).transpose(0, 1)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask.repeat(shared, 1))[0]
        out = out.reshape(out.shape[0], shared, -1, width).permute(2, 0, 1, 3)
        outputs.append(out.reshape(stop - start, slots, heads, width))
    return torch.cat(outputs)
