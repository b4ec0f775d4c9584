"""What a pass of the drafter keeps for its backward pass, a slot and a context token, and what fits which GPU.

    python benchmarks/memory.py [--slots 256]

1. One and two layers at Qwen3-8B's widths on the CPU under bfloat16 autocast: bytes that autograd keeps, each storage
   once, without the weights, of two sizes of pass. `mb_per_slot`: the slope of one layer and four times what a second
   adds; so for each `training.recompute`. On a GPU norms and attention run in other kernels: the estimate from the
   shapes (dflash/training/room.py) is beside it.
2. `predicted_vs_measured`: bytes a slot and a token from one pass with all and with half of its anchors, as a run
   measures them before its first step, foretell a pass of another shape; what that one really keeps is counted.
3. The published recipe over the rows of `_rows.py`, cut at 3,072 tokens: the largest pass that fits an H100 of 80 GB
   and an H200 of 141 GB beside a target and a drafter, and the peak. Estimated: nothing here runs on a GPU.
Goals: ≤ 0.5 MB a slot, ≤ 0.15 with recompute=layers; predicted 0.9 to 1.1 of measured; both GPUs fit. Last line: JSON.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from balance import plan, rows_of  # noqa: E402

from cache.batches.passes import PassRoom, cut_passes  # noqa: E402
from dflash.model.drafter import Drafter, DrafterShape, Recompute  # noqa: E402
from dflash.training.assumed import fixed_bytes  # noqa: E402
from dflash.training.room import PassBytes, estimated_bytes, room_for, saved_bytes  # noqa: E402

LAYERS, ROWS = 5, 200_000
MODES: tuple[Recompute, ...] = ("none", "mlp", "layers")
SHAPE = DrafterShape(
    hidden_size=4096,
    intermediate_size=12_288,
    num_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_layers=1,
    block_size=16,
    taps=(1, 9, 17, 25, 33),
    num_target_layers=36,
    vocab_size=151_936,
    mask_token_id=151_669,
    rms_norm_eps=1e-6,
    max_position_embeddings=40_960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


def kept(drafter: Drafter, context: int, anchors: int, rows: int = 1) -> int:
    """Bytes that autograd keeps of a pass of these rows, under bfloat16 autocast."""
    shape = drafter.shape
    features = torch.randn(rows, context, len(shape.taps) * shape.hidden_size).bfloat16()
    embedded = torch.randn(rows, anchors, shape.block_size, shape.hidden_size)
    anchor = torch.linspace(1, context - 1, anchors).int().expand(rows, anchors)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = drafter(features, embedded, anchor)
        return out

    return saved_bytes(run, drafter.parameters())


def measured(drafter: Drafter, context: int, anchors: int, rows: int = 1) -> PassBytes:
    """As a run does it: from all anchors and from half of them."""
    slots = anchors * rows * drafter.shape.block_size
    whole, half = kept(drafter, context, anchors, rows), kept(drafter, context, anchors // 2, rows)
    slot = (whole - half) / (slots - slots // 2)
    return PassBytes(slot, (whole - slot * slots) / (context * rows))


def largest(tokens: int, slots: int) -> tuple[int, int]:
    """Padded tokens and slots of the pass of an epoch that has the most slots, where a pass may have so many."""
    row_tokens, row_slots = rows_of(ROWS, mixed=False)
    made, found = plan(row_tokens, row_slots, 24_576), (0, 0)
    for index in range(0, made.num_steps, 8):
        rows = torch.cat([torch.from_numpy(unit) for unit in made.step(index)]).numpy()
        for ids in cut_passes(rows, row_tokens, row_slots, PassRoom(tokens, slots)):
            size = int(ids.size * row_slots[ids].max()), int(ids.size * row_tokens[ids].max())
            found = max(found, size)
    return found[1], found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256, help="slots of the smaller pass of one layer")
    given = parser.parse_args()
    torch.manual_seed(0)
    anchors = given.slots // SHAPE.block_size
    result, slopes = {}, {}
    for layers in (1, 2):
        drafter = Drafter(replace(SHAPE, num_layers=layers))
        for drafter.recompute in MODES:
            more = kept(drafter, 64, 2 * anchors) - kept(drafter, 64, anchors)
            slopes[layers, drafter.recompute] = more / (anchors * SHAPE.block_size)
    for mode in MODES:
        slope = slopes[1, mode] + (LAYERS - 1) * (slopes[2, mode] - slopes[1, mode])
        result["mb_per_slot" if mode == "none" else f"mb_per_slot_{mode}"] = round(slope / 1e6, 3)
    estimate = estimated_bytes(replace(SHAPE, num_layers=LAYERS))
    result["mb_per_slot_estimated"] = round(estimate.slot / 1e6, 3)
    print(
        f"kept a slot by five layers: {result['mb_per_slot']} MB measured on the CPU, "
        f"{result['mb_per_slot_estimated']} MB estimated for a GPU"
    )

    small = replace(
        SHAPE, hidden_size=512, intermediate_size=1536, num_heads=4, num_key_value_heads=1, num_layers=LAYERS
    )
    drafter = Drafter(small)
    foretold = measured(drafter, context=300, anchors=40, rows=4).of(tokens=3 * 500, slots=3 * 72 * 16)
    ratio = foretold / kept(drafter, context=500, anchors=72, rows=3)
    result["predicted_vs_measured"] = round(ratio, 3)
    print(f"a pass of 3,456 slots and 1,500 tokens, foretold from another: {ratio:.3f} of what it keeps")

    for name, memory in (("h100", 80e9), ("h200", 141e9)):
        fixed = fixed_bytes(replace(SHAPE, num_layers=LAYERS), target_bytes=16.4e9)
        room = room_for(estimate, 0.75 * 0.9 * (memory - fixed))
        assert room is not None, f"{name}: no pass fits"
        tokens, slots = largest(room.tokens, room.slots)
        peak = fixed + estimate.of(tokens, slots)
        print(
            f"{name}, {memory / 1e9:.0f} GB: {fixed / 1e9:.1f} GB before the first pass, room for {room.slots:,} slots "
            f"and {room.tokens:,} tokens; largest pass {slots:,} slots and {tokens:,} tokens: peak {peak / 1e9:.1f} GB "
            f"(estimated)"
        )
        result |= {
            f"{name}_pass_slots": room.slots,
            f"{name}_peak_gb": round(peak / 1e9, 1),
            f"{name}_fits": peak < memory,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
