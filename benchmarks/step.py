"""A whole optimizer step at SmolLM2-135M's sizes: ours, the same with plain parts, and that of speculators, on the CPU.

    python benchmarks/step.py [--threads 2] [--rounds 3] [--target DIR] [--context 1024] [--anchors 60]

Same weights, features, anchors and labels for all three. `plain`: SDPA with the dense mask and the logits of all slots
at once. `speculators` (PyPI, in .bench/speculators by `make setup-bench`): its DFlash with eager attention; its choice
of anchors and of labels (the verifier's argmax) are replaced by ours, its normaliser is taken out for the comparison of
Σ w·CE and gradients. Its time is given with and without the verifier's logits, which ours does not need. Features are
random unless --target names a Llama directory. Goals: loss and gradients equal to 1e-4, at least 1.5 × as fast. Last
line: JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
sys.path.append(str(ROOT / ".bench" / "speculators"))
from measure import peak_bytes, seconds  # noqa: E402

import dflash.model.drafter  # noqa: E402
from dflash.anchors import block_labels, default_gamma, slot_weights  # noqa: E402
from dflash.model.attention import attention_plan, block_attention, visible  # noqa: E402
from dflash.model.drafter import Drafter, DrafterShape  # noqa: E402
from dflash.model.head import Head  # noqa: E402
from dflash.model.loss import block_loss  # noqa: E402

# anchors · K < context: speculators then makes the verifier's logits at the blocks' positions alone, its cheaper way.
CONTEXT, ANCHORS = 1024, 60
K, LAYERS, TAPS, MASK = 16, 5, (1, 8, 14, 20, 27), 16
SHAPE = DrafterShape(
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    num_layers=LAYERS,
    block_size=K,
    taps=TAPS,
    num_target_layers=30,
    vocab_size=49152,
    mask_token_id=MASK,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)


class Problem:
    """One row: features, anchors, labels and weights, and the target's embedding and head."""

    def __init__(self, target: Path | None, context: int = CONTEXT, anchors: int = ANCHORS) -> None:
        assert anchors * K < context
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(17, SHAPE.vocab_size, (1, context), generator=generator)
        if target is None:
            weight = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) * 0.13
            self.features = torch.randn(1, context, len(TAPS) * SHAPE.hidden_size, generator=generator).bfloat16()
        else:
            from dflash.config import TargetConfig
            from dflash.target.frozen import Target

            loaded = Target.load(TargetConfig(model=str(target), dtype="float32"), TAPS, "cpu")
            weight, self.features = loaded.ends(torch.device("cpu"))[1].weight, loaded.features(self.ids)
        self.embedding = nn.Embedding.from_pretrained(weight)
        self.head = Head(self.embedding.weight)
        # The last answer token is the row's last: blocks that end in it count whole, as in speculators.
        self.mask = (torch.arange(context) >= context // 4).to(torch.uint8)
        self.anchors, first = anchors, context // 4
        self.anchor = (first + torch.randperm(context - first - K, generator=generator)[:anchors]).sort().values
        labels = block_labels(self.ids[0].int().numpy(), self.anchor.numpy(), K)
        self.labels = torch.from_numpy(labels)[None].long()
        self.weights = torch.from_numpy(slot_weights(K, default_gamma(K))).expand(1, anchors, K)
        block = torch.full((1, anchors, K), MASK)
        block[..., 0] = self.labels[..., 0]
        self.embedded = self.embedding(block)


def our_loss(drafter: Drafter, problem: Problem) -> tuple[Tensor, Tensor]:
    hidden = drafter(problem.features, problem.embedded, problem.anchor[None])
    loss = block_loss(hidden, problem.head, problem.labels, problem.weights)
    return loss.total, loss.weight


def dense_attention(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, mask: Tensor) -> Tensor:
    key, value = (
        torch.cat([c, b.flatten(1, 2)], dim=1).repeat_interleave(q.shape[3] // b.shape[3], dim=2).transpose(1, 2)
        for c, b in ((ck, bk), (cv, bv))
    )
    out = F.scaled_dot_product_attention(q.flatten(1, 2).transpose(1, 2), key, value, attn_mask=mask)
    return out.transpose(1, 2).reshape_as(q)


def plain_loss(drafter: Drafter, problem: Problem) -> tuple[Tensor, Tensor]:
    parts: Any = dflash.model.drafter
    parts.attention_plan = lambda anchor, *size: torch.stack([visible(row, *size) for row in anchor])[:, None]
    parts.block_attention = dense_attention
    try:
        hidden = drafter(problem.features, problem.embedded, problem.anchor[None])
    finally:
        parts.attention_plan, parts.block_attention = attention_plan, block_attention
    logits = hidden.flatten(0, 2) @ problem.head.weight.T
    each = F.cross_entropy(logits, problem.labels.flatten(), reduction="none")
    return (each * problem.weights.flatten()).sum(), problem.weights.sum()


def speculators_model(drafter: Drafter, problem: Problem) -> Any:
    """Its DFlash with our weights, its anchors and labels replaced by ours."""
    from speculators.models.dflash import core
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_key_value_heads,
        head_dim=SHAPE.head_dim,
        rms_norm_eps=SHAPE.rms_norm_eps,
        max_position_embeddings=SHAPE.max_position_embeddings,
        rope_parameters=dict(SHAPE.rope_parameters),
        attention_bias=False,
        attn_implementation="eager",
    )
    model = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=SHAPE.vocab_size,
            block_size=K,
            aux_hidden_state_layer_ids=list(TAPS),
            mask_token_id=MASK,
        )
    )
    missing, unexpected = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight.data.copy_(problem.head.weight)
    assert set(missing) == {f"{n}.weight" for n in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")}
    nn.init.ones_(model.verifier_norm.weight)
    core.select_anchors = lambda loss_mask, count, size: (problem.anchor, torch.ones(count, dtype=torch.bool))  # type: ignore[assignment]
    return model


class Given(nn.Module):
    """Logits made beforehand, whose argmax are our labels."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.logits = F.one_hot(labels.view(1, -1), SHAPE.vocab_size).float()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits


def speculators_loss(model: Any, problem: Problem) -> tuple[Tensor, Tensor]:
    """Its loss is Σ w·CE over the number of counted slots (+ 1e-5): both are returned."""
    from speculators.losses import resolve_loss_config

    _, loss, _ = model(
        hidden_states=problem.features.float(),
        input_ids=problem.ids,
        loss_mask=problem.mask[None],
        verifier_last_hidden_states=torch.zeros(*problem.ids.shape, SHAPE.hidden_size),
        document_ids=torch.zeros_like(problem.ids),
        loss_config=resolve_loss_config("ce", "eager"),
        gamma=default_gamma(K),
        max_anchors=problem.anchors,
    )
    return loss, torch.tensor(problem.anchors * (K - 1) + 1e-5)


def stepper(
    module: nn.Module, names: list[str], loss: Callable[[], tuple[Tensor, Tensor]], divide: bool
) -> Callable[[], None]:
    """Forward, backward, clip and AdamW."""
    parameters = [module.get_parameter(name) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        total, weight = loss()
        total.backward()  # type: ignore[no-untyped-call]
        if divide:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], weight)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=Path, help="directory of a Llama of these sizes, for real features")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--anchors", type=int, default=ANCHORS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problem = Problem(arguments.target, arguments.context, arguments.anchors)
    torch.manual_seed(0)
    drafter = Drafter(SHAPE)
    names = [name for name, _ in drafter.named_parameters()]
    result: dict[str, float] = {"threads": arguments.threads}

    def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [module.get_parameter(name) for name in names]))

    def compare(name: str, module: nn.Module, total: Tensor) -> None:
        """Differences relative to the loss, and to the largest entry of each gradient."""
        loss = our_loss(drafter, problem)[0]
        pairs = zip(gradients(drafter, loss), gradients(module, total), strict=True)
        result[f"{name}loss_difference"] = float((total / loss - 1).abs().detach())
        result[f"{name}gradient_difference"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        print({key: f"{value:.1e}" for key, value in result.items() if key.endswith("difference")}, flush=True)

    steps = {"ours": stepper(drafter, names, lambda: our_loss(drafter, problem), divide=True)}
    compare("plain_", drafter, plain_loss(drafter, problem)[0])
    plain = Drafter(SHAPE)
    plain.load_state_dict(drafter.state_dict())
    steps["plain"] = stepper(plain, names, lambda: plain_loss(plain, problem), divide=True)
    try:
        import speculators  # noqa: F401
    except ImportError as error:
        print(f"speculators is not installed ({error}): make setup-bench")
    else:
        model = speculators_model(drafter, problem)
        verifier = model.verifier_lm_head
        model.verifier_lm_head = Given(problem.labels)
        loss, slots = speculators_loss(model, problem)
        compare("", model, loss * slots)
        given = model.verifier_lm_head

        def with_verifier() -> tuple[Tensor, Tensor]:
            model.verifier_lm_head = verifier
            out = speculators_loss(model, problem)
            model.verifier_lm_head = given
            return out

        steps["speculators"] = stepper(model, names, lambda: speculators_loss(model, problem), divide=False)
        steps["speculators, verifier's logits too"] = stepper(model, names, with_verifier, divide=False)
    times = seconds(steps, arguments.rounds)
    print(
        f"context {arguments.context}, {arguments.anchors} anchors, K {K}, {LAYERS} layers, {len(TAPS)} taps, "
        f"V {SHAPE.vocab_size}, {arguments.threads} threads"
    )
    for name, time in times.items():
        print(f"{name:36}{time * 1e3:8.0f} ms{peak_bytes(steps[name]) / 1e6:8.0f} MB")
    result["vs_plain"] = round(times["plain"] / times["ours"], 2)
    if "speculators" in times:
        result["vs_speculators"] = round(times["speculators"] / times["ours"], 2)
        result["vs_speculators_with_verifier"] = round(times["speculators, verifier's logits too"] / times["ours"], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
