"""Float64 references of a few obvious lines: loops over rows, anchors and slots. Slow, and nothing else."""

import math

import torch
from torch import Tensor

from dflash.model.head import Head


def legal(mask: list[int]) -> list[int]:
    """A position and the next one supervised."""
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def counts(mask: list[int], anchor: int, block_size: int) -> list[bool]:
    """Slot k counts while every token anchor+1 … anchor+k exists and is supervised."""
    return [
        k > 0 and all(anchor + j < len(mask) and mask[anchor + j] for j in range(1, k + 1)) for k in range(block_size)
    ]


def attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    anchor: Tensor,
    window: int = 1 << 30,
    causal: bool = False,
) -> Tensor:
    """`[B, A, K, Q, D]`: one softmax for each row, block, slot and head, over the columns that it sees."""
    rows, blocks, slots, heads, width = query.shape
    shared = heads // block_key.shape[3]
    out = torch.zeros_like(query)
    for b in range(rows):
        for a in range(blocks):
            before = int(anchor[b, a])
            for h in range(heads):
                g = h // shared
                key = torch.cat([context_key[b, :before, g], block_key[b, a, :, g]])
                value = torch.cat([context_value[b, :before, g], block_value[b, a, :, g]])
                for k in range(slots):
                    scores = key @ query[b, a, k, h] / math.sqrt(width)
                    # Column c of the context lies at c, slot j of the block at before + j.
                    away = torch.tensor([before + k - c for c in range(before + slots)])
                    hidden = (away >= window) | ((away < 0) if causal else (-away >= window))
                    weights = scores.masked_fill(hidden, -torch.inf).softmax(0)
                    out[b, a, k, h] = weights @ value
    return out


def logits(hidden: Tensor, head: Head) -> Tensor:
    """softcap((W·h + b)·scale)."""
    value = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    value = value * head.scale
    return value if head.softcap is None else head.softcap * (value / head.softcap).tanh()


def cross_entropy(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
    """−log softmax at the label, slot by slot."""
    flat = [
        -logits(h, head).log_softmax(-1)[int(label)]
        for h, label in zip(hidden.reshape(-1, hidden.shape[-1]), labels.flatten(), strict=True)
    ]
    return torch.stack(flat).view(labels.shape)


def divergence(hidden: Tensor, head: Head, states: Tensor) -> Tensor:
    """Σ p·(log p − log q), p the target's law, q the drafter's."""
    q, p = logits(hidden, head).log_softmax(-1), logits(states, head).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def dpace(confidence: Tensor, counted: Tensor) -> Tensor:
    """w_k = Σ_{j ≥ k} Π_{i ≤ j} (½·q_i + ½), over the counted slots of one block."""
    chosen = [k for k in range(len(confidence)) if counted[k]]
    weights = torch.zeros_like(confidence)
    for k in chosen:
        for j in (j for j in chosen if j >= k):
            weights[k] += math.prod(0.5 * float(confidence[i]) + 0.5 for i in chosen if i <= j)
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, position: int, inverse: Tensor) -> Tensor:
    """Each pair (x_i, x_{i+D/2}) turned by position · inverse frequency i; x is `[heads, D]`."""
    half = x.shape[-1] // 2
    out = torch.zeros_like(x)
    for i in range(half):
        angle = position * float(inverse[i])
        out[:, i] = x[:, i] * math.cos(angle) - x[:, i + half] * math.sin(angle)
        out[:, i + half] = x[:, i + half] * math.cos(angle) + x[:, i] * math.sin(angle)
    return out


def drafter_block(w: dict[str, Tensor], shape, features: Tensor, embedded: Tensor, anchor: int) -> Tensor:  # type: ignore[no-untyped-def]
    """Final hidden states of one block `[K, H]` of one row, from its features `[S, N·H]`, straight from the paper."""
    eps, width = shape.rms_norm_eps, shape.head_dim
    theta = shape.rope_parameters["rope_theta"]
    inverse = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    shared = shape.num_heads // shape.num_key_value_heads
    fused = rms_norm(features[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    hidden = embedded
    for layer in range(shape.num_layers):
        p = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}

        def heads(x: Tensor, name: str, p=p) -> Tensor:  # type: ignore[no-untyped-def]
            return (x @ p[f"self_attn.{name}_proj.weight"].T).view(x.shape[0], -1, width)

        inner = rms_norm(hidden, p["input_layernorm.weight"], eps)
        everything = torch.cat([fused, inner])  # position of entry i: i in the context, and anchor + k in the block
        key = rms_norm(heads(everything, "k"), p["self_attn.k_norm.weight"], eps)
        key = torch.stack([rotated(k, position, inverse) for position, k in enumerate(key)])
        value = heads(everything, "v")
        query = rms_norm(heads(inner, "q"), p["self_attn.q_norm.weight"], eps)
        query = torch.stack([rotated(q, anchor + k, inverse) for k, q in enumerate(query)])
        rows = []
        for slot in query:
            mixed = []
            for h, q in enumerate(slot):
                weights = (key[:, h // shared] @ q / math.sqrt(width)).softmax(0)
                mixed.append(weights @ value[:, h // shared])
            rows.append(torch.cat(mixed))
        hidden = hidden + torch.stack(rows) @ p["self_attn.o_proj.weight"].T
        inner = rms_norm(hidden, p["post_attention_layernorm.weight"], eps)
        gate, up = inner @ p["mlp.gate_proj.weight"].T, inner @ p["mlp.up_proj.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * up) @ p["mlp.down_proj.weight"].T
    return rms_norm(hidden, w["norm.weight"], eps)
