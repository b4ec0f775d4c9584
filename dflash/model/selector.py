"""DFlash 2's candidate selector: among a slot's largest logits, the token that goes best with the one before it.

S(p, c) = U(c) + Σ_i A[p,i] · (H·h)_i · B[c,i]        c among the k largest of U
loss = base loss of U + α · Σ w·CE of softmax_c S     over slots whose label is a candidate
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dflash.model.candidates import Candidates
from dflash.model.head import Head, at_least_float32
from dflash.model.look_back import Ends, LookBack, Slots
from dflash.model.loss import BlockLoss, block_loss
from dflash.model.shape import DrafterShape

_GATHERED = 1 << 24  # elements of rows that are gathered at once: 64 MiB in float32


class CandidateSelector(LookBack):
    """Tables: predecessor and successor codebook."""

    name = "candidate_selector"

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        self.count = shape.candidates
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.rank, bias=False)
        if self.free:
            self.predecessor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.rank))
            self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.rank))

    def start(self, generator: torch.Generator) -> None:
        super().start(generator)
        nn.init.normal_(self.hidden_projection.weight, std=0.02, generator=generator)

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.predecessor_codebook, self.successor_codebook

    def meet(self, hidden: Tensor, read: Tensor) -> Tensor:
        met: Tensor = read * self.hidden_projection(hidden)
        return met

    def loss(self, hidden: Tensor, read: Tensor, ends: Ends, slots: Slots) -> BlockLoss:
        if not slots.selector_weight:
            return block_loss(hidden, ends.head, slots.labels, slots.weights, slots.kind, slots.states, slots.counted)
        base = block_loss(
            hidden, ends.head, slots.labels, slots.weights, slots.kind, slots.states, slots.counted, self.count
        )
        assert base.best is not None
        assert base.slot_weight is not None
        values, ids = base.best
        picked, label = hidden.flatten(0, 2)[slots.counted], slots.labels.flatten()[slots.counted].long()
        vector = self.vector(picked, read.flatten(0, 2)[slots.counted], ends)
        loss, right = _CandidateLoss.apply(  # type: ignore[no-untyped-call]
            picked, vector, self.table(ends.head), ends.head, values, ids, label, self.table_scale(ends.head)
        )
        zeros = torch.zeros_like(base.counted_by_slot)
        slot = slots.counted % slots.weights.shape[-1]
        return replace(
            base,
            total=base.total + slots.selector_weight * (loss * base.slot_weight).sum(),
            correct_by_slot=zeros.index_add(0, slot, right.float()),
        )

    def logits(self, hidden: Tensor, previous: Tensor, ends: Ends) -> Tensor:
        logits = ends.head.logits(hidden)
        logits = logits.to(at_least_float32(logits.dtype))
        best = Candidates(self.count)
        best.add(logits, 0)
        values, ids = best.by_id()
        vector = self.vector(hidden, self.read(previous, ends.embedding), ends)
        scores = _scores(values, self.table(ends.head)[ids], vector, self.table_scale(ends.head))
        return torch.full_like(logits, -torch.inf).scatter(1, ids, scores)


def _scores(
    values: Float[Tensor, "n k"], rows: Float[Tensor, "n k w"], vector: Float[Tensor, "n w"], scale: float
) -> Float[Tensor, "n k"]:
    bonus = torch.bmm(rows.to(vector.dtype), vector[..., None]).squeeze(-1)
    return values + scale * bonus.to(values.dtype)


class _CandidateLoss(torch.autograd.Function):
    """CE of each slot over its candidates, 0 where the label is none of them; with e = softmax(S) − onehot,

    ∂h = Σ_c e_c·slope·scale·W[c],  ∂v = Σ_c e_c·T[c],  ∂T[c] = e_c·v
    """

    @staticmethod
    def forward(ctx, hidden, vector, table, head: Head, values, ids, label, scale: float):  # type: ignore[no-untyped-def]
        same = table is head.weight
        loss, right = torch.empty_like(values[:, 0]), torch.empty_like(label, dtype=torch.bool)
        errors = torch.empty_like(values)
        grads = torch.empty_like(hidden), torch.empty_like(vector)
        step = max(1, _GATHERED // (values.shape[1] * max(table.shape[1], head.weight.shape[1])))
        for start in range(0, values.shape[0], step):
            piece = slice(start, start + step)
            rows = table[ids[piece]]
            scores = _scores(values[piece], rows, vector[piece], scale)
            at = ids[piece] == label[piece, None]
            covered = at.any(1)
            loss[piece] = torch.where(covered, scores.logsumexp(1) - torch.where(at, scores, 0.0).sum(1), 0.0)
            right[piece] = at.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)
            error = (scores.softmax(1) - at.to(scores.dtype)) * covered[:, None]
            errors[piece] = error
            grads[1][piece] = scale * _weighed(error, rows)
            slope = head.slope(values[piece])
            bent = head.scale * (error if slope is None else error * slope)
            grads[0][piece] = _weighed(bent, rows if same else head.weight[ids[piece]])
        ctx.save_for_backward(*grads, errors, ids, vector)
        ctx.rows = table.shape if table.requires_grad else None
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    def backward(ctx, upstream, _):  # type: ignore[no-untyped-def]
        hidden, vector, errors, ids, given = ctx.saved_tensors
        table = None
        if ctx.rows is not None:
            table = vector.new_zeros(ctx.rows)
            for one in range(ids.shape[1]):  # by candidate: [n, k, r] would be k times as large
                table.index_add_(0, ids[:, one], (errors[:, one] * upstream)[:, None].to(given.dtype) * given)
        down = upstream[:, None]
        return hidden * down.to(hidden.dtype), vector * down.to(vector.dtype), table, *[None] * 5


def _weighed(error: Float[Tensor, "n k"], rows: Float[Tensor, "n k w"]) -> Float[Tensor, "n w"]:
    return torch.bmm(error[:, None].to(rows.dtype), rows).squeeze(1)
