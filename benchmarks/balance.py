"""Eight processes share out each step evenly, passes are hardly padded, and the plan of an epoch is made in a moment.

    python benchmarks/balance.py [--rows 902087] [--tokens-per-step 24576] [--pass-slots 32768]

Rows are those of `_rows.py`, cut at 3,072 tokens, 60 % of each supervised; 512 anchors, K = 16. A row costs what
Qwen3-8B's target (to layer 33) and a drafter of five layers compute for its tokens and slots (dflash/target/flops.py).
`efficiency_8` is the mean over the largest cost of eight processes, padding included, summed over the steps;
`efficiency_8_if_slots_cost_half` the same where units are dealt by these costs but a slot really takes half as long.
`mixed` has the same rows with a share of 5 to 95 % supervised, at random. Goals: efficiency ≥ 0.97, padding of tokens
and of slots ≤ 0.02 each, the plan in ≤ 0.5 s and ≤ 40 bytes a row at its peak. Last line: JSON.
"""

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from _rows import FULL_ROWS, lengths_of  # noqa: E402

from cache.batches.epoch import EpochPlan, plan_epoch  # noqa: E402
from cache.batches.passes import PassRoom, cut_passes, deal  # noqa: E402

TOKEN, SLOT = 13.6, 8.4  # GFLOP
STEPS = 2000  # that are looked at


def rows_of(count: int, mixed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and slots of each row."""
    tokens = np.minimum(lengths_of(count), 3072).astype(np.int32)
    share = np.random.default_rng(1).uniform(0.05, 0.95, count) if mixed else 0.6
    return tokens, 16 * np.minimum(512, np.maximum(0, (tokens * share).astype(np.int32) - 1))


def plan(tokens: np.ndarray, slots: np.ndarray, per_step: int) -> EpochPlan:
    rows = np.arange(tokens.size, dtype=np.int32)
    return plan_epoch(tokens, slots, rows, tokens_per_step=per_step, seed=0, epoch=0)


def shares(tokens: np.ndarray, slots: np.ndarray, made: EpochPlan, processes: int, room: PassRoom) -> dict[str, float]:
    """Balance of the processes and padding of their passes over some steps of the epoch."""
    loads, padded, whole, passes = [], np.zeros(2), np.zeros(2), 0
    for index in range(0, made.num_steps, max(1, made.num_steps // STEPS)):
        units, of_process = made.step(index), []
        cost = [TOKEN * int(tokens[unit].sum()) + SLOT * int(slots[unit].sum()) for unit in units]
        for mine in deal(cost, processes):
            own = np.zeros(2)
            rows = np.concatenate([made.row_ids[:0], *(units[unit] for unit in mine)])
            for ids in cut_passes(rows, tokens, slots, room):
                own += [ids.size * tokens[ids].max(), ids.size * slots[ids].max()]
                whole += [tokens[ids].sum(), slots[ids].sum()]
                passes += 1
            padded += own
            of_process.append(own)
        loads.append(of_process)
    found = {}
    for name, slot in (("", SLOT), ("_if_slots_cost_half", SLOT / 2)):
        each = np.array(loads) @ [TOKEN, slot]
        found[f"efficiency_{processes}{name}"] = round(float(each.mean(1).sum() / each.max(1).sum()), 4)
    token_share, slot_share = 1 - whole / padded
    return found | {
        "padded_tokens": round(float(token_share), 4),
        "padded_slots": round(float(slot_share), 4),
        "passes_a_step": round(passes / len(loads) / processes, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=FULL_ROWS)
    parser.add_argument("--tokens-per-step", type=int, default=24_576)
    parser.add_argument("--pass-slots", type=int, default=32_768)
    given = parser.parse_args()
    room, result = PassRoom(given.pass_slots // 2, given.pass_slots), {}
    for name in ("mixed", "rows"):
        tokens, slots = rows_of(given.rows, name == "mixed")
        made = plan(tokens, slots, given.tokens_per_step)
        for processes in (1, 2, 4, 8):
            result = shares(tokens, slots, made, processes, room)
            print(f"{name}, {processes} processes: {result}", flush=True)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        made = plan(tokens, slots, given.tokens_per_step)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    made = plan(tokens, slots, given.tokens_per_step)
    held, peak = tracemalloc.get_traced_memory()
    size = [int(tokens[np.concatenate(made.step(index))].sum()) for index in range(0, made.num_steps, 20)]
    result |= {
        "steps": made.num_steps,
        "step_tokens": round(statistics.mean(size)),
        "step_tokens_deviation": round(statistics.stdev(size)),
        "plan_s": round(statistics.median(seconds), 3),
        "plan_bytes_a_row": round(held / given.rows, 1),
        "plan_peak_bytes_a_row": round(peak / given.rows, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
