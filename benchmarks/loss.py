"""Cross-entropy through the frozen head in tiles, against the plain one over the same slots, on the CPU.

    python benchmarks/loss.py [--threads 2] [--rounds 5] [--slots 360]

Plain: all logits at once, F.cross_entropy, backward. Goals: no slower, with at most 1.3 × the memory of one chunk: the
logits of one tile (512 slots × 6,144 rows of the head) and the gradient of the hidden states, which every version
makes. Last line: JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from measure import peak_bytes, seconds  # noqa: E402

import dflash.model.loss  # noqa: E402
from dflash.model.head import Head  # noqa: E402
from dflash.model.loss import block_loss  # noqa: E402

V, H = 49152, 576


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=360, help="24 blocks of 15 counted slots by default")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    slots = arguments.slots
    head = Head(torch.randn(V, H) * 0.04)
    hidden = torch.randn(1, 1, slots, H, requires_grad=True)
    labels, weights = torch.randint(0, V, (1, 1, slots)), torch.rand(1, 1, slots) + 0.1

    def ours() -> Tensor:
        return finish(block_loss(hidden, head, labels, weights).total)

    def plain() -> Tensor:
        logits = hidden.view(slots, H) @ head.weight.T
        return finish((F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten()).sum())

    def finish(total: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(total, hidden)
        return gradient

    difference = float((ours() - plain()).abs().max() / plain().abs().max())
    runs = {"ours": ours, "plain": plain}
    time, memory = seconds(runs, arguments.rounds), {name: peak_bytes(run) for name, run in runs.items()}
    rows, columns = dflash.model.loss._TILE["cpu"]
    chunk = 4 * (min(slots, rows) * columns + slots * H)
    print(f"{slots} slots, V {V}, {arguments.threads} threads; gradient's largest difference {difference:.1e}")
    for name in runs:
        print(f"{name:8}{time[name] * 1e3:8.0f} ms{memory[name] / 1e6:8.1f} MB")
    result = {
        "vs_plain_time": round(time["ours"] / time["plain"], 3),
        "vs_plain_memory": round(memory["ours"] / memory["plain"], 3),
        "vs_chunk_memory": round(memory["ours"] / chunk, 2),
        "gradient_difference": difference,
        "threads": arguments.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
