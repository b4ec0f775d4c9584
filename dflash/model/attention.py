"""Block attention: every slot sees the context before its anchor and its own block, both directions, nothing else.

A block needs S + K columns, never S + A·K, and of the context only what lies before its anchor. So anchors, ascending,
are taken in groups of a few: one softmax a group, over the context up to its last anchor and the group's own blocks.
Nothing but the inputs is kept for the backward pass, which makes the softmax again. On CUDA the same mask goes to flex
attention, which skips what no slot of a tile sees. One block a row, as in decoding, needs no such thing: there the
whole mask has S + K columns, and nothing has to be compiled.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash.model.flex import FlexMask, Window, flex_block_attention, flex_mask

# Slots that share one softmax. More: fewer calls, but each pays for blocks and context that it may not see.
_GROUP_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks start..stop of a row. All of them see the context before `shared`, some more of it up to `context`."""

    start: int
    stop: int
    shared: int
    context: int
    bias: Float[
        Tensor, "blocks slots columns"
    ]  # one slot where all of a block see the same; 0 or −∞ on columns from `shared` on


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who sees what in one micro-batch: made once, used by every layer."""

    groups: tuple[tuple[Group, ...], ...]  # by row; on CUDA empty
    mask: FlexMask | Tensor | None  # on CUDA flex attention's, or a tensor of the columns that are seen


def attention_plan(
    anchor: Int[Tensor, "B A"], context: int, block_size: int, window: Window | None = None
) -> AttentionPlan:
    """The plan for blocks of `block_size` slots at ascending anchors, over a context of `context` positions."""
    if anchor.is_cuda and anchor.shape[1] == 1:
        return one_block_plan(anchor, context, block_size, window)
    if anchor.is_cuda:
        return AttentionPlan((), flex_mask(anchor, context, block_size, window))
    step = max(1, _GROUP_SLOTS // block_size)
    rows = []
    for positions in anchor.tolist():
        assert positions == sorted(positions)
        assert positions[-1] <= context
        pieces = [(start, positions[start : start + step]) for start in range(0, len(positions), step)]
        rows.append(tuple(_group(start, piece, block_size, window) for start, piece in pieces))
    return AttentionPlan(tuple(rows), None)


def one_block_plan(
    anchor: Int[Tensor, "B 1"], context: int, block_size: int, window: Window | None = None
) -> AttentionPlan:
    """The plan for one block a row: without a window all of its slots see the same columns."""
    seen = torch.stack([visible(row, context, block_size, window)[: None if window else 1] for row in anchor])
    return AttentionPlan((), seen[:, None])


def block_attention(
    query: Float[Tensor, "B A K Q D"],
    context_key: Float[Tensor, "B S G D"],
    context_value: Float[Tensor, "B S G D"],
    block_key: Float[Tensor, "B A K G D"],
    block_value: Float[Tensor, "B A K G D"],
    plan: AttentionPlan,
) -> Float[Tensor, "B A K Q D"]:
    """Attention of A blocks of K slots a row; Q query heads share G key/value heads (Q a multiple of G).

    Context positions ≥ a block's anchor are invisible to it. Scores are scaled by 1/√D.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, context_key, context_value, block_key, block_value = (
        t.to(dtype) for t in (query, context_key, context_value, block_key, block_value)
    )
    if isinstance(plan.mask, FlexMask):
        return flex_block_attention(query, context_key, context_value, block_key, block_value, plan.mask)
    if plan.mask is not None:
        return _masked(query, context_key, context_value, block_key, block_value, plan.mask)
    out: Tensor = _Grouped.apply(query, context_key, context_value, block_key, block_value, plan)  # type: ignore[no-untyped-call]
    return out


def visible(
    anchor: Int[Tensor, " A"], context: int, block_size: int, window: Window | None = None
) -> Bool[Tensor, "A*K context+A*K"]:
    """The mask as a matrix: which of the context and block columns each slot of one row sees."""
    block = torch.arange(anchor.numel(), device=anchor.device).repeat_interleave(block_size)
    before = torch.arange(context, device=anchor.device)[None, :] < anchor.repeat_interleave(block_size)[:, None]
    seen = torch.cat([before, block[:, None] == block[None, :]], dim=1)
    if window is None:
        return seen
    slot = anchor.repeat_interleave(block_size) + torch.arange(block_size, device=anchor.device).repeat(anchor.numel())
    column = torch.cat([torch.arange(context, device=anchor.device), slot])
    return seen & _near(slot[:, None] - column, window)


def _near(distance: Tensor, window: Window) -> Tensor:
    """Whether a key is visible so far back, or ahead where it is negative."""
    return (distance < window.size) & (distance >= 0 if window.causal else -distance < window.size)


def _masked(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    mask: Bool[Tensor, "B 1 slots columns"],
) -> Tensor:
    """`block_attention` with the whole mask."""
    key = torch.cat([context_key, block_key.flatten(1, 2)], dim=1).transpose(1, 2)
    value = torch.cat([context_value, block_value.flatten(1, 2)], dim=1).transpose(1, 2)
    slots, gqa = query.flatten(1, 2).transpose(1, 2), query.shape[3] != block_key.shape[3]
    out = F.scaled_dot_product_attention(slots, key, value, attn_mask=mask, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(query.shape)


def _group(start: int, positions: list[int], block_size: int, window: Window | None) -> Group:
    """The bias of a group has one row a block where all slots of a block see the same."""
    anchors = torch.tensor(positions)
    seen = visible(anchors, positions[-1], block_size, window)
    if window is None:
        shared, seen = positions[0], seen[::block_size, None]
    else:  # a window may hide any of the context
        shared, seen = 0, seen.view(-1, block_size, seen.shape[1])
    bias = torch.zeros(seen[..., shared:].shape).masked_fill(~seen[..., shared:], -torch.inf)
    return Group(start, start + len(positions), shared, positions[-1], bias)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, context_key, context_value, block_key, block_value, plan):  # type: ignore[no-untyped-def]
        tensors = (query, context_key, context_value, block_key, block_value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        scratch = _scratch(query, plan)
        with torch.autocast(query.device.type, enabled=False):
            for b, groups in enumerate(plan.groups):
                for group in groups:
                    part = _Part.of(tensors, b, group)
                    weights = part.softmax(scratch)
                    c = group.context
                    value = weights[..., :c] @ part.context_value
                    value.baddbmm_(weights[..., c:], part.block_value)
                    _put(out[b, group.start : group.stop], value)
        ctx.save_for_backward(*tensors, out)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        *tensors, out = ctx.saved_tensors
        query_grad = torch.empty_like(out)
        # Key heads first, as they are computed.
        context_key_grad, context_value_grad = (t.new_zeros(t.transpose(1, 2).shape) for t in tensors[1:3])
        block_key_grad, block_value_grad = (t.new_empty(t.permute(0, 3, 1, 2, 4).shape) for t in tensors[3:])
        scratch, scratch_grad = _scratch(out, ctx.plan), _scratch(out, ctx.plan)
        for b, groups in enumerate(ctx.plan.groups):
            for group in groups:
                part, c, blocks = _Part.of(tensors, b, group), group.context, slice(group.start, group.stop)
                heads = part.query.shape[0]
                down, value = (_by_key_head(t[b, blocks], heads) for t in (upstream, out))
                # P = softmax(S), O = P·V:  ∂V = Pᵀ·∂O,  ∂S = P∘(∂O·Vᵀ − rowsum(∂O∘O)),  ∂Q = ∂S·K,  ∂K = ∂Sᵀ·Q
                weights = part.softmax(scratch)
                grad = part.products(down, part.context_value, part.block_value, scratch_grad)
                grad.sub_((down * value).sum(-1, keepdim=True)).mul_(weights)
                context_value_grad[b, :, :c].baddbmm_(weights[..., :c].transpose(1, 2), down)
                context_key_grad[b, :, :c].baddbmm_(grad[..., :c].transpose(1, 2), part.query)
                block_value_grad[b, :, blocks] = (weights[..., c:].mT @ down).view(part.as_blocks)
                block_key_grad[b, :, blocks] = (grad[..., c:].mT @ part.query).view(part.as_blocks)
                query = grad[..., :c] @ part.context_key
                query.baddbmm_(grad[..., c:], part.block_key)
                _put(query_grad[b, blocks], query.mul_(out.shape[-1] ** -0.5))
        context_grads = (context_key_grad.transpose(1, 2), context_value_grad.transpose(1, 2))
        block_grads = (block_key_grad.permute(0, 2, 3, 1, 4), block_value_grad.permute(0, 2, 3, 1, 4))
        return query_grad, *context_grads, *block_grads, None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one group reads, key heads first; the query heads of a key head lie one after another and are scaled."""

    query: Float[Tensor, "G slots D"]
    context_key: Float[Tensor, "G context D"]
    context_value: Float[Tensor, "G context D"]
    block_key: Float[Tensor, "G blocks*K D"]
    block_value: Float[Tensor, "G blocks*K D"]
    shape: tuple[int, int]  # blocks, K
    group: Group

    @property
    def as_blocks(self) -> tuple[int, ...]:
        """Shape of `block_key` with its blocks apart."""
        return (self.block_key.shape[0], *self.shape, self.block_key.shape[2])

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], b: int, group: Group) -> "_Part":
        query, context_key, context_value, block_key, block_value = (t[b] for t in tensors)
        blocks = slice(group.start, group.stop)
        return cls(
            _by_key_head(query[blocks], block_key.shape[2]) * query.shape[-1] ** -0.5,
            context_key[: group.context].transpose(0, 1),
            context_value[: group.context].transpose(0, 1),
            block_key[blocks].flatten(0, 1).transpose(0, 1),
            block_value[blocks].flatten(0, 1).transpose(0, 1),
            (group.stop - group.start, block_key.shape[1]),
            group,
        )

    def products(self, left: Tensor, context: Tensor, block: Tensor, scratch: Tensor) -> Tensor:
        """left · [context ; block]ᵀ, in `scratch`."""
        heads, slots, columns = *left.shape[:2], context.shape[1] + block.shape[1]
        out = scratch[: heads * slots * columns].view(heads, slots, columns)
        torch.bmm(left, context.transpose(1, 2), out=out[..., : context.shape[1]])
        torch.bmm(left, block.transpose(1, 2), out=out[..., context.shape[1] :])
        return out

    def softmax(self, scratch: Tensor) -> Tensor:
        """Attention weights of the group's slots over its columns, in `scratch`."""
        scores = self.products(self.query, self.context_key, self.block_key, scratch)
        by_block = scores.view(scores.shape[0], -1, *self.shape, scores.shape[2])
        by_block[..., self.group.shared :] += self.group.bias.to(scores.dtype)
        torch.softmax(scores, -1, out=scores)
        return scores


def _scratch(like: Tensor, plan: AttentionPlan) -> Tensor:
    """Room for the scores of any group: allocated once, not for each of them."""
    _, _, slots, heads, _ = like.shape
    rows = ((g.stop - g.start, g.context) for groups in plan.groups for g in groups)
    return like.new_empty(max(heads * n * slots * (context + n * slots) for n, context in rows))


def _by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """`[blocks, K, Q, D]` → `[G, Q/G · blocks · K, D]`: the query heads of a key head one after another."""
    blocks, slots, heads, width = x.shape
    grouped = x.reshape(blocks * slots, key_heads, heads // key_heads, width).permute(1, 2, 0, 3)
    return grouped.reshape(key_heads, -1, width)


def _put(out: Tensor, x: Tensor) -> None:
    """Inverse of `_by_key_head`, into `out [blocks, K, Q, D]`."""
    blocks, slots, heads, width = out.shape
    grouped = x.view(x.shape[0], heads // x.shape[0], blocks * slots, width)
    out.view(blocks * slots, x.shape[0], -1, width).copy_(grouped.permute(2, 0, 1, 3))
