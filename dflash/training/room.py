"""How much one pass may have: as many slots and tokens as the drafter's device holds activations for.

A pass keeps so many bytes a slot and a token for its backward pass. Both are measured on the largest pass there may be,
once with all of its anchors and once with half of them; where even that is too much, a pass is halved until it fits.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from numpy import ndarray
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cache.batches.gather import Buffers
from cache.batches.passes import PassRoom
from dflash.batch import FeatureBatch, Position
from dflash.host import free_bytes
from dflash.model.drafter import DrafterShape, Recompute
from dflash.pipeline.device import Lane, Stopwatch, receive
from dflash.pipeline.train_plan import MOST, TrainPlan
from dflash.target.frozen import Target
from dflash.training.step import Trainer

log = logging.getLogger(__name__)

_LEAST_SLOTS = 1024  # a room of fewer is not worth a try: a row is not cut
_SHARE = 0.9  # of the free memory: allocators round up and leave gaps


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Activations that one pass keeps, a slot and a context token."""

    slot: float
    token: float

    def of(self, tokens: int, slots: int) -> float:
        """Bytes of a pass of so many, padding included."""
        return self.slot * slots + self.token * tokens


def estimated_bytes(shape: DrafterShape, recompute: Recompute = "none") -> PassBytes:
    """What autograd keeps under bfloat16 autocast, counted from the shapes, where nothing can be measured.

    Of a layer and slot, all in bfloat16: gate, up and their product; the two norms' inputs and outputs; queries and
    keys before their norms; what attention reads and makes. What is made again keeps its input, the residual in
    float32; of one layer at a time all is there while its gradient is computed.
    """
    hidden, heads, groups, width = shape.hidden_size, shape.num_heads, shape.num_key_value_heads, shape.head_dim
    attention, mlp = 4 * hidden + (6 * heads + 6 * groups) * width, 4 * hidden + 6 * shape.intermediate_size
    layer, at_once = {
        "none": (attention + mlp, 0),
        "mlp": (attention + 4 * hidden, mlp),
        "layers": (4 * hidden, attention + mlp),
    }[recompute]
    features = 2 * len(shape.taps) * hidden
    key_value = 6 * groups * width
    return PassBytes(
        slot=shape.num_layers * layer + at_once + 6.0 * hidden,
        token=features + 4.0 * hidden + shape.num_layers * key_value,
    )


def room_for(bytes_of: PassBytes, available: float) -> PassRoom | None:
    """The largest room whose activations fit: MOST, halved until they do, so that a start like the last one finds the
    same room. None where not even the least does."""
    room = MOST
    while bytes_of.of(room.tokens, room.slots) > available:
        room = PassRoom(room.tokens // 2, room.slots // 2)
        if room.slots < _LEAST_SLOTS:
            return None
    return room


def largest_pass(plan: TrainPlan) -> ndarray | None:
    """Rows of the pass of the first epoch that has the most slots."""
    passes = (rows for _, rows in plan.passes(0, 0, 1))
    return max(passes, key=lambda rows: int(plan.row_slots[rows].max()) * rows.size, default=None)


def fit_room(
    plan: TrainPlan, target: Target, trainer: Trainer, available: Callable[[], float] | None = None
) -> tuple[PassRoom, PassBytes | None]:
    """Measure, halve the plan's room until its largest pass fits, and leave the trainer as it was.

    `available` says how many bytes there are for activations; by default what is free of three quarters of the memory
    after the optimizer has taken its own: the last one is for features that wait.
    """
    if plan.room.slots != MOST.slots:  # training.pass_slots
        return plan.room, None
    while True:
        try:
            measured = _measured(plan, target, trainer)
            room = room_for(measured, (available or (lambda: _available(trainer)))()) if measured else plan.room
        except torch.OutOfMemoryError:
            if plan.room.slots // 2 < _LEAST_SLOTS:
                raise
            trainer.forget()
            if trainer.device.type == "cuda":
                torch.cuda.empty_cache()
            plan.room = PassRoom(plan.room.tokens // 2, plan.room.slots // 2)
            log.warning("a pass does not fit: halved to %d slots", plan.room.slots)
            continue
        if room is None:
            raise torch.OutOfMemoryError(f"not even a pass of {_LEAST_SLOTS} slots fits beside target and drafter")
        plan.room = PassRoom(min(room.tokens, plan.room.tokens), min(room.slots, plan.room.slots))
        return plan.room, measured


def _available(trainer: Trainer) -> float:
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps is free, too
    return _SHARE * 0.75 * (free_bytes(trainer.device) - trainer.claim_bytes)


def _measured(plan: TrainPlan, target: Target, trainer: Trainer) -> PassBytes | None:
    """From the largest pass, with all of its anchors and with half of them; None where there is one anchor or none."""
    rows = largest_pass(plan)
    if rows is None:
        return None
    item = features_of(plan, target, trainer, rows)
    whole = _kept(trainer, item)
    half = _with_half_of_the_anchors(item)
    if half is None:
        return None
    less = _kept(trainer, half)
    slot = max(0.0, (whole - less) / (item.batch.padded_slots - half.batch.padded_slots))
    return PassBytes(slot, max(0.0, whole - slot * item.batch.padded_slots) / item.batch.padded)


def features_of(plan: TrainPlan, target: Target, trainer: Trainer, rows: ndarray) -> FeatureBatch:
    """A pass of these rows, on the trainer's device."""
    lane = Lane(target.devices, trainer.device)
    buffers = Buffers(max(plan.buffer_tokens, rows.size * int(plan.row_tokens[rows].max())))
    batch = plan.make_batch(Position(0, 0, 0), rows, buffers)
    item = lane.carry(batch, target.features, Stopwatch(target.devices[-1]), lambda: None)
    receive(item, trainer.device)
    return item


def _with_half_of_the_anchors(item: FeatureBatch) -> FeatureBatch | None:
    batch, count = item.batch, item.batch.anchor.shape[1] // 2
    if not count:
        return None
    weights = batch.weights[:, :count].contiguous()
    cut = replace(
        batch,
        anchor=batch.anchor[:, :count].contiguous(),
        labels=batch.labels[:, :count].contiguous(),
        weights=weights,
        counted=torch.nonzero(weights.flatten()).squeeze(1),
    )
    return replace(item, batch=cut)


def _kept(trainer: Trainer, item: FeatureBatch) -> int:
    """Most bytes that a pass takes at once on a GPU; on a CPU, what autograd keeps of it."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
        before = torch.cuda.memory_allocated(trainer.device)
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.accumulate(item)
        torch.cuda.synchronize(trainer.device)
        peak = torch.cuda.max_memory_allocated(trainer.device) - before
    else:
        peak = saved_bytes(lambda: trainer.accumulate(item), trainer.parameters.values())
    trainer.forget()
    return peak


def saved_bytes(run: Callable[[], object], weights: object = ()) -> int:
    """Bytes that autograd keeps for the backward pass of `run`, each storage once, without the weights."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}  # type: ignore[attr-defined]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(kept.values())
