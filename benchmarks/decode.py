"""Speculative decoding against plain decoding with the target: same process, prompts, kind of cache; T = 0, on the CPU.

    python benchmarks/decode.py [--threads 2]      a tiny target, and a drafter that is taught its texts; under a minute
    python benchmarks/decode.py --target DIR --drafter RUN/export/dflash [--prompts 8] [--max-new-tokens 64]

Each prompt is decoded alone, first by the target, then with the drafter. The texts must be equal token for token, or
part where the target's two best logits are nearly equal; the tiny target computes in float64 and has no such tie. Then
all is done again with a clock in every part of a round. A drafter is no small part of a small target, so the ratio may
be below 1 on a CPU; the last table shows what a round costs beside the two models. Last line: JSON.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dflash.config import DrafterConfig, EvaluationConfig, TargetConfig  # noqa: E402
from dflash.decoding import decode  # noqa: E402
from dflash.decoding.decode import Context, DecodeLimits, plain  # noqa: E402
from dflash.decoding.rollback import RowCache  # noqa: E402
from dflash.decoding.sampling import Sampling, SeededDice  # noqa: E402
from dflash.evaluation.comparison import compare, facts  # noqa: E402
from dflash.model.drafter import Drafter, embed_blocks  # noqa: E402
from dflash.model.few_rows import decode_with_few_rows  # noqa: E402
from dflash.model.head import Head  # noqa: E402
from dflash.model.layouts import load_exported  # noqa: E402
from dflash.target.frozen import Target, drafter_shape  # noqa: E402
from dflash.training.initial_drafter import new_drafter  # noqa: E402

Ends = tuple[nn.Module, Head]
CPU = torch.device("cpu")
K, VOCABULARY, MASK = 8, 512, 3
PROMPT, TEXT = 16, 64  # tokens of the tiny target's prompts and of the texts that its drafter is taught


def tiny(prompts: int) -> tuple[Target, Drafter, Ends, list[Tensor]]:
    """A random Llama of 8 layers, and a drafter that knows half of the texts it will be asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # its greedy texts are no constants
        eos_token_id=2,
    )
    own = DrafterConfig(layers=2, block_size=K, taps=[1, 4, 6], mask_token_id=MASK, init="target")
    shape = drafter_shape(own, config)
    target = Target(LlamaForCausalLM(config).double(), shape.taps)
    drafter = new_drafter(shape, own, target, seed=0).double()
    asked = list(torch.randint(4, VOCABULARY, (prompts, PROMPT)))
    teach(target, drafter, target.ends(CPU), asked[::2])
    return target, drafter.eval(), target.ends(CPU), asked


def teach(target: Target, drafter: Drafter, ends: Ends, prompts: list[Tensor]) -> None:
    """Some steps on the target's own greedy texts, at every anchor."""
    dice = SeededDice(0)
    texts = [plain(target, prompt, DecodeLimits(TEXT), Sampling(), dice).ids for prompt in prompts]
    rows = torch.stack([torch.cat([p, torch.tensor(t)]) for p, t in zip(prompts, texts, strict=True)])
    features, stop = target.features(rows), PROMPT + TEXT - K
    anchors = torch.arange(PROMPT, stop).expand(len(rows), -1)
    labels = torch.stack([rows[:, PROMPT + k : stop + k] for k in range(K)], dim=-1)
    embedded = embed_blocks(ends[0], labels[..., 0], K, MASK)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=2e-3)
    for _ in range(30):
        logits = ends[1].logits(drafter(features, embedded, anchors)[:, :, 1:])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 2), labels[:, :, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def real(directory: Path, exported: Path, prompts: int) -> tuple[Target, Drafter, Ends, list[Tensor]]:
    """A target and its exported drafter; prompts are the last of the examples' conversations, up to the answer."""
    from transformers import AutoTokenizer

    drafter = load_exported(exported).eval()
    target = Target.load(TargetConfig(model=str(directory), dtype="float32"), drafter.shape.taps, CPU)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    lines = (ROOT / "examples" / "smollm2-chat.jsonl").read_text().splitlines()[-prompts:]
    asked = [
        tokenizer.apply_chat_template(json.loads(line)["messages"][:1], add_generation_prompt=True, return_tensors="pt")
        for line in lines
    ]
    return target, drafter, target.ends(CPU), [ids["input_ids"][0] for ids in asked]


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Seconds by part of a round, while parts are wrapped. Parts do not hold each other."""
    spent: dict[str, float] = defaultdict(float)
    places: list[tuple[Any, str, str]] = [
        (RowCache, "extend", "target's pass"),
        (decode, "draft_logits", "drafter's blocks and head"),
        (Context, "write", "drafter's keys of the context"),
        (Sampling, "propose", "choosing drafts"),
        (decode, "_accept", "accepting"),
        (RowCache, "keep", "cropping the cache"),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - start

        return run

    for place, name, part in places:
        setattr(place, name, timed(part, getattr(place, name)))
    try:
        yield spent
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="directory of the target")
    parser.add_argument("--drafter", type=Path, help="its drafter, exported in either layout")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=TEXT)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if (arguments.target is None) != (arguments.drafter is None):
        parser.error("--target and --drafter belong together")
    torch.set_num_threads(arguments.threads)
    if arguments.target is None:
        target, drafter, ends, prompts = tiny(arguments.prompts)
    else:
        target, drafter, ends, prompts = real(arguments.target, arguments.drafter, arguments.prompts)
    for model in (target.model, drafter):
        decode_with_few_rows(model)
    eos = target.model.generation_config.eos_token_id
    stop = frozenset() if arguments.target is None else frozenset(eos if isinstance(eos, list) else [eos])
    config = EvaluationConfig(max_new_tokens=arguments.max_new_tokens)

    asked = [("all", prompt) for prompt in prompts]
    said = facts(compare(target, drafter, ends, asked, config, stop, lambda _: None), config, drafter.shape.block_size)
    with clocks() as spent:
        again = compare(target, drafter, ends, asked, config, stop, lambda _: None)
    rounds = sum(len(one.speculative.emitted) for one in again)
    whole = sum(one.speculative.seconds for one in again)

    print(f"{len(prompts)} prompts, at most {config.max_new_tokens} tokens, K {drafter.shape.block_size}, T 0")
    print(f"τ {said['tau']:.3f}, accepted drafts a round {said['accepted_per_round']:.3f}")
    print(f"plain        {said['plain_tokens_per_s']:8.1f} tokens/s")
    print(f"speculative  {said['speculative_tokens_per_s']:8.1f} tokens/s, {said['speedup']:.2f} ×")
    print(f"{said['identical']} of {len(prompts)} texts identical, {said['near_ties']} parted at a near tie")
    print(f"{'a round':32}{'ms':>8}")
    spent["everything else, prompts too"] = whole - sum(spent.values())
    for part, value in spent.items():
        print(f"{part:32}{value / rounds * 1e3:8.3f}")
    assert said["lossless"], "the two ways gave different texts"
    kept = ("tau", "accepted_per_round", "identical", "near_ties", "plain_tokens_per_s", "speculative_tokens_per_s")
    result = {name: said[name] for name in (*kept, "speedup")} | {"prompts": len(prompts), "rounds": said["rounds"]}
    print(json.dumps({k: round(v, 3) for k, v in result.items()} | {"threads": arguments.threads}))


if __name__ == "__main__":
    main()
