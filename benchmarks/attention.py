"""Block attention against SDPA with the dense mask of [A·K, S+A·K], forward and backward, on the CPU.

    python benchmarks/attention.py [--threads 2]

The dense mask is what is done without flex attention. Goals: at least 2 × as fast as the default SDPA with no more
memory, and 3 × as fast as its math backend with a third of the memory. Last line: JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from measure import peak_bytes, seconds  # noqa: E402

from dflash.model.attention import attention_plan, block_attention, visible  # noqa: E402

S, A, K, HEADS, D = 1024, 64, 16, 9, 64


def dense(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, anchor: Tensor) -> Tensor:
    """One call over all columns, key heads repeated where they are shared."""
    shared = q.shape[3] // bk.shape[3]
    key, value = (
        torch.cat([c, b.flatten(1, 2)], dim=1).repeat_interleave(shared, dim=2).transpose(1, 2)
        for c, b in ((ck, bk), (cv, bv))
    )
    mask = torch.stack([visible(row, S, K) for row in anchor])[:, None]
    out = F.scaled_dot_product_attention(q.flatten(1, 2).transpose(1, 2), key, value, attn_mask=mask)
    return out.transpose(1, 2).reshape_as(q)


def ours(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, anchor: Tensor) -> Tensor:
    """The plan is made once a micro-batch, for all layers; here it is paid for by one."""
    return block_attention(q, ck, cv, bk, bv, attention_plan(anchor, S, K))


def inputs(key_heads: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of one row, and its sorted anchors."""
    torch.manual_seed(0)
    shapes = [(1, A, K, HEADS, D), *[(1, S, key_heads, D)] * 2, *[(1, A, K, key_heads, D)] * 2]
    return [torch.randn(shape, requires_grad=True) for shape in shapes], torch.randperm(S)[:A].sort().values[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for key_heads in (HEADS, HEADS // 3):
        tensors, anchor = inputs(key_heads)
        upstream = torch.randn_like(tensors[0])

        def step(attention: object, tensors=tensors, anchor=anchor, upstream=upstream) -> None:
            attention(*tensors, anchor).backward(upstream)  # type: ignore[operator]
            for tensor in tensors:
                tensor.grad = None

        def math_step(step=step) -> None:
            with sdpa_kernel(SDPBackend.MATH):
                step(dense)

        difference = (ours(*tensors, anchor) - dense(*tensors, anchor)).abs().max().item()
        runs = {"ours": lambda step=step: step(ours), "dense": lambda step=step: step(dense), "math": math_step}
        time = seconds(runs, arguments.rounds)
        memory = {name: peak_bytes(run) for name, run in runs.items()}
        print(f"{HEADS} heads, {key_heads} key heads; largest difference {difference:.1e}")
        print(f"{'':8}{'ms':>8}{'MB':>8}")
        for name in runs:
            print(f"{name:8}{time[name] * 1e3:8.0f}{memory[name] / 1e6:8.1f}")
        results[key_heads] = {
            f"vs_{name}_{what}": round(values[name] / values["ours"], 2)
            for name in ("dense", "math")
            for what, values in (("time", time), ("memory", memory))
        }
    grouped = {f"grouped_{name}": value for name, value in results[HEADS // 3].items()}
    print(json.dumps(results[HEADS] | grouped | {"threads": arguments.threads}))


if __name__ == "__main__":
    main()
