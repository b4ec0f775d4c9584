"""What only a machine with a GPU can show, in one run of a few minutes; needs torch, transformers and numpy.

    python benchmarks/gpu.py             at Qwen3-8B's sizes with random weights: 40 GB of GPU memory or more
    python benchmarks/gpu.py --smoke     at tiny sizes, also on a CPU: shows that the script itself works

1. The CUDA paths against the CPU's float32: block attention (flex attention), loss and gradients under bfloat16
   autocast, the target's features, texts of speculative decoding.
2. The drafter's step: time, memory, MFU.
3. The target's pass up to its last tap: tokens/s, MFU.
4. Both on one GPU, one after another for each micro-batch: tokens/s.
5. Decoding: time of a plain pass and of a speculative round.
Without a GPU it says so and ends. Last line: JSON.
"""

import argparse
import importlib.util
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))


class StandIn:
    """A name of a library that is not here and not needed: may be called, subscripted and derived from."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Takes anything."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0]

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


# Settings and annotations are made with these; what is measured here uses neither.
for name in ("jaxtyping", "pydantic", "accelerate"):
    if importlib.util.find_spec(name) is None:
        for module in (name, f"{name}.hooks", f"{name}.utils"):
            sys.modules[module] = types.ModuleType(module)
            sys.modules[module].__getattr__ = lambda attribute: StandIn  # type: ignore[method-assign]

from dflash.decoding.decode import DecodeLimits, plain, seeded, speculate  # noqa: E402
from dflash.decoding.sampling import Sampling  # noqa: E402
from dflash.model.attention import attention_plan, block_attention  # noqa: E402
from dflash.model.drafter import Drafter, DrafterShape  # noqa: E402
from dflash.model.head import Head  # noqa: E402
from dflash.model.loss import block_loss  # noqa: E402
from dflash.target.frozen import Target  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}  # dense bfloat16
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def shape(small: bool) -> DrafterShape:
    return DrafterShape(
        hidden_size=64 if small else 4096,
        intermediate_size=128 if small else 12288,
        num_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        num_layers=2 if small else 5,
        block_size=16,
        taps=(1, 3) if small else (1, 9, 17, 25, 33),
        num_target_layers=6 if small else 36,
        vocab_size=256 if small else 151936,
        mask_token_id=7,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_parameters=ROPE,
    )


def qwen3(s: DrafterShape, dtype: torch.dtype) -> PreTrainedModel:
    """A random target of the drafter's sizes, on the device of the context."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        intermediate_size=s.intermediate_size,
        num_hidden_layers=s.num_target_layers,
        num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_key_value_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.max_position_embeddings,
        rope_parameters=dict(ROPE),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


class Batch:
    """Random features, sorted anchors, labels and weights of some rows."""

    def __init__(self, s: DrafterShape, rows: int, length: int, anchors: int, device: torch.device) -> None:
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


def loss(drafter: Drafter, head: Head, batch: Batch, autocast: bool) -> Tensor:
    with torch.autocast(batch.anchor.device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = drafter(batch.features, batch.embedded.to(drafter.fc.weight.dtype), batch.anchor)
        out = block_loss(hidden, head, batch.labels, batch.weights)
    return out.total / out.weight


def compare_attention() -> dict[str, float]:
    """Outputs and gradients in float32, of the largest value; a GPU may multiply with 10 bits of mantissa (TF32)."""
    g = torch.Generator().manual_seed(0)
    context, blocks, k, heads, key_heads, d = 300, 40, 16, 8, 2, 64
    sizes = [(2, blocks, k, heads, d), *[(2, context, key_heads, d)] * 2, *[(2, blocks, k, key_heads, d)] * 2]
    tensors = [torch.randn(size, generator=g) for size in sizes]
    anchor = torch.stack([torch.randperm(context, generator=g)[:blocks].sort().values for _ in range(2)])

    def run(device: torch.device, blocks: int) -> list[Tensor]:
        first = [tensors[0][:, :blocks], *tensors[1:3], *(t[:, :blocks] for t in tensors[3:])]
        here = [t.detach().to(device).requires_grad_() for t in first]
        out = block_attention(*here, attention_plan(anchor[:, :blocks].to(device), context, k))
        return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().sum(), here))]

    found = {}
    for kind, count in (("attention_difference", blocks), ("one_block_difference", 1)):
        pairs = zip(run(CPU, count), run(DEVICE, count), strict=True)
        found[kind] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        assert found[kind] < 5e-3, found
    return found


def compare_step() -> dict[str, float]:
    """Loss and gradient of a small drafter under bfloat16 autocast against float32: equal to about 2⁻⁸."""
    s = shape(small=True)
    torch.manual_seed(0)
    exact = Drafter(s)
    rounded = Drafter(s)
    rounded.load_state_dict(exact.state_dict())
    rounded.to(DEVICE)
    weight = torch.randn(s.vocab_size, s.hidden_size) * 0.05
    a = loss(exact, Head(weight), Batch(s, 2, 300, 40, CPU), autocast=False)
    b = loss(rounded, Head(weight.to(DEVICE, torch.bfloat16)), Batch(s, 2, 300, 40, DEVICE), autocast=True)
    a.backward()  # type: ignore[no-untyped-call]
    b.backward()  # type: ignore[no-untyped-call]
    cosine = 1.0
    for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        cosine = min(cosine, float(nn.functional.cosine_similarity(p.grad.flatten(), q.grad.cpu().flatten(), dim=0)))
    difference = abs(float(b) / float(a) - 1)
    assert difference < 0.01, (float(a), float(b))
    assert cosine > 0.98, cosine
    return {"loss_difference": difference, "gradient_cosine": cosine}


def compare_target() -> dict[str, float]:
    """Features of a small float32 target; and texts of both ways of decoding, which may part at a near tie only."""
    s = shape(small=True)
    ids = torch.randint(8, s.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    model = qwen3(s, torch.float32)
    want = Target(model, s.taps).features(ids)
    got = Target(qwen3(s, torch.float32).to(DEVICE), s.taps).features(ids.to(DEVICE))
    difference = float((got.cpu().float() - want.float()).abs().max() / want.float().abs().max())
    assert difference < 0.02, difference

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config).to(DEVICE), (0, 2))
    tiny = DrafterShape(64, 96, 4, 2, 16, 1, 6, (0, 2), 4, 64, 7, 1e-6, 256, ROPE)
    drafter, ends = Drafter(tiny).to(DEVICE).eval(), target.ends(target.device)
    prompts, limits = [row[:n] % 64 for row, n in zip(ids, (9, 30), strict=True)], DecodeLimits(40)
    helped = speculate(target, drafter, ends, prompts, limits, Sampling(), seeded(0, 2, DEVICE))
    same = 0
    for prompt, text in zip(prompts, helped, strict=True):
        alone = plain(target, prompt, limits, Sampling(), seeded(0, 1, DEVICE)[0])
        parts = next((i for i, (a, b) in enumerate(zip(alone.ids, text.ids, strict=True)) if a != b), None)
        same += parts is None
        assert parts is None or text.ids[parts] in alone.ties[parts], (parts, alone.ties)
    return {"features_difference": difference, "texts_identical": same}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measured(run: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of a run, after two that compile and warm up."""
    for _ in range(2):
        run()
    synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    synchronize()
    return (time.perf_counter() - start) / rounds


def measure(small: bool, rows: int) -> dict[str, float | None]:
    """Times, memory and MFU; raises OutOfMemoryError where that many rows do not fit."""
    s = shape(small)
    length, anchors = (256, 32) if small else (3072, 512)
    with DEVICE:
        model = qwen3(s, torch.bfloat16)
        torch.manual_seed(0)
        drafter = Drafter(s)
    target = Target(model, s.taps)
    ends = target.ends(target.device)
    head = ends[1]
    batch = Batch(s, rows, length, anchors, DEVICE)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        loss(drafter, head, batch, autocast=True).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ids = torch.randint(8, s.vocab_size, (rows, length), device=DEVICE)

    def both() -> None:
        batch.features = target.features(ids)
        step()

    step_s = measured(step)
    memory = torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else None
    target_s, both_s = measured(lambda: target.features(ids)), measured(both)
    tokens, slots = rows * length, rows * anchors * s.block_size
    # 2 FLOPs a weight and token forward, 4 backward; the frozen head needs the gradient of its input alone.
    layer = sum(p.numel() for p in drafter.layers.parameters()) * slots
    context = (
        drafter.fc.weight.numel() + 2 * s.num_layers * s.hidden_size * s.num_key_value_heads * s.head_dim
    ) * tokens
    drafter_flops = 6 * (layer + context) + 4 * head.weight.numel() * slots * (s.block_size - 1) / s.block_size
    depth = (s.taps[-1] + 1) / s.num_target_layers
    target_flops = 2 * sum(p.numel() for p in model.get_decoder().layers.parameters()) * depth * tokens
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)

    drafter = drafter.to(torch.bfloat16).eval()
    prompt, limits = ids[0, : length // 4].cpu(), DecodeLimits(8 if small else 32)
    plain(target, prompt, DecodeLimits(2), Sampling(), seeded(0, 1, DEVICE)[0])
    speculate(target, drafter, ends, [prompt], DecodeLimits(4), Sampling(), seeded(0, 1, DEVICE))
    alone = plain(target, prompt, limits, Sampling(), seeded(0, 1, DEVICE)[0])
    (helped,) = speculate(target, drafter, ends, [prompt], limits, Sampling(), seeded(0, 1, DEVICE))
    return {
        "rows": rows,
        "step_s": round(step_s, 4),
        "step_peak_gb": memory and round(memory, 1),
        "drafter_mfu": peak and round(drafter_flops / step_s / peak, 3),
        "target_s": round(target_s, 4),
        "target_tokens_per_s": round(tokens / target_s),
        "target_mfu": peak and round(target_flops / target_s / peak, 3),
        "pipeline_tokens_per_s": round(tokens / both_s),
        "plain_pass_s": round(alone.seconds / len(alone.ids), 4),
        "speculative_round_s": round(helped.seconds / (1 + len(helped.emitted)), 4),  # the prompt's own pass is one
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU: nothing worth measuring")
    parser.add_argument("--rows", type=int, default=8, help="of 3,072 tokens; halved until they fit")
    arguments = parser.parse_args()
    if DEVICE.type == "cpu" and not arguments.smoke:
        print("no GPU here, so nothing was run; on one, this measures:")
        print("\n".join(__doc__.splitlines()[5:13]))
        print(json.dumps({"unrun": "no GPU"}))
        return
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"}
    for part in (compare_attention, compare_step, compare_target):
        result |= part()
        print(result, flush=True)
    rows = 2 if arguments.smoke else arguments.rows
    while rows:
        try:
            result |= measure(arguments.smoke, rows)
            break
        except torch.OutOfMemoryError:
            print(f"{rows} rows do not fit", flush=True)
        torch.cuda.empty_cache()
        rows //= 2
    print(json.dumps(result | {"smoke": arguments.smoke}))


if __name__ == "__main__":
    main()
