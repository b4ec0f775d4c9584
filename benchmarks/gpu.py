"""What only a machine with a GPU can show, in one run of a few minutes; needs torch, transformers and numpy.

    python benchmarks/gpu.py [--small]

1. The CUDA paths (flex attention, bfloat16 autocast, tiles of the head) against the CPU's float32.
2. The drafter's step at Qwen3-8B's sizes with random weights: time, memory, MFU.
3. The target's pass up to its last tap: tokens/s, MFU.
4. Both on one GPU, one after another for each micro-batch: tokens/s.
Without a GPU it says so and ends. Last line: JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash.drafter import Drafter, DrafterShape
from dflash.loss import Head, block_loss

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}  # dense bfloat16
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def shape(small: bool) -> DrafterShape:
    return DrafterShape(
        hidden_size=256 if small else 4096,
        intermediate_size=512 if small else 12288,
        num_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        head_dim=64 if small else 128,
        num_layers=2 if small else 5,
        block_size=16,
        taps=(1, 3) if small else (1, 9, 17, 25, 33),
        num_target_layers=6 if small else 36,
        vocab_size=1024 if small else 151936,
        mask_token_id=7,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_parameters=ROPE,
    )


class Batch:
    """Random features, sorted anchors, labels and weights of some rows."""

    def __init__(self, s: DrafterShape, rows: int, length: int, anchors: int, device: str) -> None:
        g = torch.Generator().manual_seed(0)
        k, width = s.block_size, len(s.taps) * s.hidden_size
        self.features = torch.randn(rows, length, width, generator=g).bfloat16().to(device)
        self.embedded = torch.randn(rows, anchors, k, s.hidden_size, generator=g).to(device)
        drawn = [torch.randperm(length - k, generator=g)[:anchors].sort().values for _ in range(rows)]
        self.anchor = torch.stack(drawn).to(device)
        self.labels = torch.randint(0, s.vocab_size, (rows, anchors, k), generator=g).to(device)
        weights = torch.exp(-(torch.arange(k) - 1.0) / 7)
        weights[0] = 0
        self.weights = weights.expand(rows, anchors, k).contiguous().to(device)


def loss(drafter: Drafter, head: Head, batch: Batch, device: str) -> Tensor:
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        hidden = drafter(batch.features, batch.embedded.to(drafter.fc.weight.dtype), batch.anchor)
        out = block_loss(hidden, head, batch.labels, batch.weights)
    return out.total / out.weight


def compare() -> dict[str, float]:
    """Loss and gradient of a small drafter, CUDA against CPU: bfloat16 gives them to about 2⁻⁸."""
    s = shape(small=True)
    torch.manual_seed(0)
    cpu = Drafter(s)
    gpu = Drafter(s)
    gpu.load_state_dict(cpu.state_dict())
    gpu.to("cuda")
    weight = torch.randn(s.vocab_size, s.hidden_size) * 0.05
    a = loss(cpu, Head(weight), Batch(s, 2, 300, 40, "cpu"), "cpu")
    b = loss(gpu, Head(weight.cuda().bfloat16()), Batch(s, 2, 300, 40, "cuda"), "cuda")
    a.backward()
    b.backward()
    pairs = [(p.grad, q.grad.cpu()) for p, q in zip(cpu.parameters(), gpu.parameters(), strict=True)]
    cosine = min(float(nn.functional.cosine_similarity(p.flatten(), q.flatten(), dim=0)) for p, q in pairs)
    assert abs(float(b) / float(a) - 1) < 0.01, (float(a), float(b))
    assert cosine > 0.98, cosine
    return {"loss_difference": abs(float(b) / float(a) - 1), "gradient_cosine": cosine}


def measured(run: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of a run, after two that compile and warm up."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, to see that the script itself works")
    small = parser.parse_args().small
    if not torch.cuda.is_available():
        print("no GPU here: nothing was run")
        print(json.dumps({"unrun": "no GPU"}))
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from dflash.target import Target

    result: dict[str, float | str] = {"device": torch.cuda.get_device_name(), **compare()}
    print(result, flush=True)
    s = shape(small)
    rows, length, anchors = (2, 256, 32) if small else (8, 3072, 512)
    peak = next((v for k, v in PEAK_FLOPS.items() if k in str(result["device"])), float("nan"))
    with torch.device("cuda"):
        torch.manual_seed(0)
        drafter = Drafter(s)
        config = Qwen3Config(
            vocab_size=s.vocab_size,
            hidden_size=s.hidden_size,
            intermediate_size=s.intermediate_size,
            num_hidden_layers=s.num_target_layers,
            num_attention_heads=s.num_heads,
            num_key_value_heads=s.num_key_value_heads,
            head_dim=s.head_dim,
            rope_parameters=dict(ROPE),
            dtype=torch.bfloat16,
        )
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    target = Target(model, s.taps)
    _, head = target.ends(torch.device("cuda:0"))
    batch = Batch(s, rows, length, anchors, "cuda")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss(drafter, head, batch, "cuda").backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ids = torch.randint(0, s.vocab_size, (rows, length), device="cuda")

    def both() -> None:
        batch.features = target.features(ids)
        step()

    torch.cuda.reset_peak_memory_stats()
    step_s = measured(step)
    result["step_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    target_s, both_s = measured(lambda: target.features(ids)), measured(both)
    tokens, slots = rows * length, rows * anchors * s.block_size
    # 2 FLOPs a weight and token forward, 4 backward; the frozen head needs the gradient of its input alone.
    layer = sum(p.numel() for p in drafter.layers.parameters()) * slots
    context = (
        drafter.fc.weight.numel() + 2 * s.num_layers * s.hidden_size * s.num_key_value_heads * s.head_dim
    ) * tokens
    drafter_flops = 6 * (layer + context) + 4 * head.weight.numel() * slots * (s.block_size - 1) / s.block_size
    depth = (s.taps[-1] + 1) / s.num_target_layers
    target_flops = 2 * sum(p.numel() for p in model.model.layers.parameters()) * depth * tokens
    result |= {
        "step_s": round(step_s, 4),
        "drafter_mfu": round(drafter_flops / step_s / peak, 3),
        "target_s": round(target_s, 4),
        "target_tokens_per_s": round(tokens / target_s),
        "target_mfu": round(target_flops / target_s / peak, 3),
        "pipeline_tokens_per_s": round(tokens / both_s),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
