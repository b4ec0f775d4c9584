"""The pipeline keeps its targets busy, costs next to nothing itself, and does not grow.

    python benchmarks/pipeline.py [--batches 150] [--scale 1.0] [--only devices|cpu] [--target DIR]

Devices are simulated at the proportions of the run behind this project: 3 targets of 480 ms and a drafter of 150 ms a
pass, log-normal (σ 0.2), 10 % of each stage's time holding the interpreter lock. Rows are as long as its
902,087; reading them is this project's own gather. What counts begins after 20 passes. Then the real stages on
this machine's cores with SmolLM2-135M, against target alone and drafter alone on the same passes.
Goals: targets ≥ 98 % busy, throughput ≥ 97 % of the bottleneck's own, reads < 1 % of a target's time, overhead
< 0.3 ms a pass, flat memory, CPU wall time ≤ 1.05 × (target alone + drafter alone). Last line: JSON.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from _rows import FULL_ROWS, lengths_of  # noqa: E402

from cache.batches.gather import Buffers, gather, prefetch  # noqa: E402
from cache.disk.store import TokenCache  # noqa: E402
from dflash.batch import FeatureBatch, Step  # noqa: E402
from dflash.config import DrafterConfig, RunConfig, TargetConfig, TrainingConfig  # noqa: E402
from dflash.host import cpu_threads  # noqa: E402
from dflash.pipeline.pipeline import Pipeline  # noqa: E402
from dflash.pipeline.stages import HasFeatures  # noqa: E402
from dflash.pipeline.train_plan import TrainPlan  # noqa: E402
from dflash.step_sums import PendingReport  # noqa: E402
from dflash.target.frozen import Target, drafter_shape  # noqa: E402
from dflash.training.initial_drafter import new_drafter  # noqa: E402
from dflash.training.step import Trainer  # noqa: E402

CPU = torch.device("cpu")
TARGETS, TARGET_S, DRAFTER_S, SIGMA, LOCKED = 3, 0.480, 0.150, 0.2, 0.1
WARM = 20
HOME = Path(os.environ.get("DFLASH_HOME") or Path(__file__).parents[1] / "var").expanduser()
SMOLLM2 = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


class Device:
    """Works for log-normal times, a part of each in Python, the rest without the interpreter lock."""

    def __init__(self, mean_s: float, seed: int) -> None:
        self.random, self.mean_s = np.random.default_rng(seed), mean_s
        self.device, self.devices, self.nominal_s, self.count = CPU, (CPU,), 0.0, 0
        self.worked: list[tuple[float, float]] = []

    def work(self) -> None:
        seconds = self.mean_s * float(self.random.lognormal(-(SIGMA**2) / 2, SIGMA)) if self.mean_s else 0.0
        start = time.perf_counter()
        end, locked = start + seconds, start + LOCKED * seconds
        while time.perf_counter() < locked:
            pass
        if seconds:
            time.sleep(max(0.0, end - time.perf_counter()))
        self.nominal_s += seconds
        self.count += 1
        self.worked.append((start, time.perf_counter()))

    def busy(self, start: float, end: float) -> float:
        """Seconds that it worked between two times."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in self.worked)


class SimulatedTarget(Device):
    def features(self, ids: Tensor) -> Tensor:
        self.work()
        return torch.zeros(1)


class SimulatedTrainer(Device):
    def accumulate(self, item: FeatureBatch) -> None:
        self.work()

    def step(self, at: Step) -> PendingReport:
        return PendingReport(at, 0.0, 0, torch.zeros(1))


class SimulatedPipeline(Pipeline):
    """Every simulated device is one of its own."""

    def takes_turns(self, target: HasFeatures) -> bool:
        return False


def sparse_cache(directory: Path, lengths: np.ndarray) -> TokenCache:
    """Rows in a file of zeros: read like a cache that lies in memory, without the 7 GB of the real one."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    path = directory / "ids"
    with path.open("wb") as stream:
        stream.truncate(int(offsets[-1]) * 4)
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    ids = np.frombuffer(mapped, dtype=np.uint32)
    mask = np.broadcast_to(np.uint8(1), ids.shape)
    zeros = np.zeros(len(lengths), dtype=np.uint8)
    return TokenCache(directory, None, ids, mask, offsets, zeros, zeros, zeros, {"ids": mapped, "mask": mapped})  # type: ignore[arg-type]


def new_plan(store: TokenCache, **training: Any) -> TrainPlan:
    settings = TrainingConfig(**{"epochs": 1, **training})
    return TrainPlan(store, RunConfig(target=TargetConfig(model="-"), drafter=DrafterConfig(), training=settings))


def simulate(plan: TrainPlan, batches: int, target_s: float, drafter_s: float) -> dict[str, Any]:
    """Run so many passes after the warm-up; what the stages did in that time."""
    targets = [SimulatedTarget(target_s, seed) for seed in range(TARGETS)]
    trainer = SimulatedTrainer(drafter_s, TARGETS)
    pipeline = SimulatedPipeline(plan, trainer, targets)
    seen: list[dict[str, float]] = []

    def on_step(report: PendingReport) -> bool:
        if len(seen) < 2 and trainer.count >= WARM + len(seen) * batches:  # a step may have several passes
            clocks = pipeline._clocks
            seen.append(
                {
                    "wall": time.perf_counter(),
                    "read": clocks["read"][0].busy,
                    "nominal": sum(t.nominal_s for t in targets),
                    "drafter": trainer.nominal_s,
                    "passes": trainer.count,
                    "done": sum(t.count for t in targets),
                    "reads": clocks["read"][0].items,
                }
            )
        return trainer.count < WARM + batches

    pipeline.run(0, 0, 1, on_step)
    window = seen[0]["wall"], seen[1]["wall"]
    change = {name: seen[1][name] - seen[0][name] for name in seen[0]}
    own = max(change["nominal"] / change["done"] / TARGETS, change["drafter"] / change["passes"])  # seconds a pass
    return {
        "targets_busy": round(statistics.mean(t.busy(*window) for t in targets) / change["wall"], 4),
        "vs_bottleneck": round(own * change["passes"] / change["wall"], 4),
        "reader_ms": round(1e3 * change["read"] / change["reads"], 3),
        "wall_ms": 1e3 * change["wall"] / change["passes"],
        "stages": pipeline.stages(),
    }


def overhead_ms(store: TokenCache, batches: int) -> float:
    """Milliseconds that a pass takes when no stage does anything."""
    plan = new_plan(store, tokens_per_step=4096)
    position, rows = next(plan.passes(0, 0, 1))
    batch = plan.make_batch(position, rows, Buffers(plan.buffer_tokens))
    plan.make_batch = lambda *_: batch  # type: ignore[method-assign]
    return statistics.median(simulate(plan, batches, 0.0, 0.0)["wall_ms"] for _ in range(3))


def read_ms(plan: TrainPlan, batches: int) -> float:
    """Milliseconds of reading one pass: prefetch and gather, each page for the first time."""
    times, buffers = [], Buffers(plan.buffer_tokens)
    for _, rows in islice(plan.passes(0, 0, 1), 1000, 1000 + batches):
        start = time.perf_counter()
        prefetch(plan.store, rows)
        gather(plan.store, rows, buffers)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.mean(times)


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def growth_bytes(store: TokenCache, batches: int) -> int:
    """Growth of private memory between a fifth and the end of so many passes with real reads."""
    plan, trainer, seen = new_plan(store, tokens_per_step=8192), SimulatedTrainer(0.0, 0), []
    pipeline = SimulatedPipeline(plan, trainer, [SimulatedTarget(0.0, 0)])

    def on_step(report: PendingReport) -> bool:
        if trainer.count in (batches // 5, batches):
            seen.append(private_bytes())
        return trainer.count < batches

    pipeline.run(0, 0, 1, on_step)
    return seen[1] - seen[0]


def on_cpu(directory: Path, path: Path | None, batches: int, rounds: int) -> dict[str, float]:
    """Seconds of target and drafter alone and of the pipeline, on the same passes; medians of the rounds."""
    torch.set_num_threads(cpu_threads())
    settings = DrafterConfig(layers=2, block_size=8, taps=3, mask_token_id=16)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if path else LlamaForCausalLM(SMOLLM2)
    shape = drafter_shape(settings, model.config)
    target = Target(model, shape.taps)
    training = TrainingConfig(epochs=1, tokens_per_step=200, anchors=24)
    trainer = Trainer(new_drafter(shape, settings, target, seed=0), *target.ends(CPU), training)
    store = sparse_cache(directory, np.full(2 * batches, 100))  # two rows a pass
    plan = TrainPlan(store, RunConfig(target=TargetConfig(model="-"), drafter=settings, training=training))
    work = list(plan.passes(0, 0, 1))
    items = [plan.make_batch(position, rows, Buffers(plan.buffer_tokens)) for position, rows in work]
    seconds: list[dict[str, float]] = []
    for warm in (True, *[False] * rounds):
        start = time.perf_counter()
        features = [target.features(batch.ids) for batch in items]
        middle = time.perf_counter()
        for step, batch, values in zip(plan.work(0, 0, 1), items, features, strict=True):  # of one pass each
            trainer.accumulate(FeatureBatch(batch, values))
            trainer.step(step)
        end = time.perf_counter()
        Pipeline(plan, trainer, [target], threads=cpu_threads()).run(0, 0, 1, lambda _: True)
        if not warm:
            wall = time.perf_counter() - end
            seconds.append({"target": middle - start, "drafter": end - middle, "wall": wall})
    ratio = statistics.median(s["wall"] / (s["target"] + s["drafter"]) for s in seconds)
    parts = {f"cpu_{name}_s": round(statistics.median(s[name] for s in seconds), 3) for name in seconds[0]}
    return parts | {"cpu_wall": round(ratio, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=150, help="passes that count")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the simulated times")
    parser.add_argument("--only", choices=["devices", "cpu"], help="the simulated devices, or the real stages")
    parser.add_argument("--target", type=Path, help="SmolLM2-135M; by default the demo's below $DFLASH_HOME/targets")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if arguments.only != "cpu":
            result |= on_devices(directory, arguments.batches, arguments.scale)
        if arguments.only != "devices":
            path = arguments.target or next(iter(HOME.glob("targets/*/config.json")), Path()).parent
            is_there = (path / "config.json").is_file()
            print(f"target on the CPU: {path if is_there else 'random weights in the shape of SmolLM2-135M'}")
            result |= on_cpu(directory, path if is_there else None, batches=5, rounds=3)
    print(json.dumps(result))


def on_devices(directory: Path, batches: int, scale: float) -> dict[str, Any]:
    """What is measured with simulated devices."""
    store = sparse_cache(directory, lengths_of(FULL_ROWS))
    result = simulate(new_plan(store), batches, scale * TARGET_S, scale * DRAFTER_S)
    for name, shares in result.pop("stages").items():
        print(f"{name:<8}" + "  ".join(f"{what} {share:6.1%}" for what, share in shares.items()))
    result["read_ms"] = round(read_ms(new_plan(store), 200), 3)
    result["read_share"] = round(result["read_ms"] / 1e3 / (scale * TARGET_S), 5)
    result["wall_ms"] = round(result["wall_ms"], 1)
    result["overhead_ms"] = round(overhead_ms(store, 2000), 4)
    result["growth_bytes"] = growth_bytes(store, 2000)
    return result


if __name__ == "__main__":
    main()
