"""Starting points: the same for the same seed; copies that compute what the target's layers do, or a refusal."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.errors import ConfigMismatch
from dflash.model.drafter import Drafter
from dflash.target.frozen import Target, decoder_layers, drafter_shape
from dflash.training.initial_drafter import new_drafter

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def target(config: Any) -> Target:
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return Target(made, (1, 3))


def start(of: Target, init: str = "target", seed: int = 0) -> Drafter:
    config = DrafterConfig(layers=2, block_size=4, taps=[1, 3], mask_token_id=63, init=init)  # type: ignore[arg-type]
    return new_drafter(drafter_shape(config, of.model.config), config, of, seed)


def test_random_start_depends_on_the_seed_alone() -> None:
    of = target(hf.LlamaConfig(**BASE))
    first, same, other = (start(of, "random", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert float(first["fc.weight"].std()) == pytest.approx(0.02, rel=0.1)


def captured_keys(of: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the target's second last layer projects to keys and values."""
    seen: dict[str, Tensor] = {}
    attention = decoder_layers(of.model)[-2].self_attn
    for name in ("k_proj", "v_proj"):
        attention.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        of.model(ids, use_cache=False)
    return seen["k_proj"], seen["v_proj"]


@pytest.mark.parametrize("config", [hf.LlamaConfig(**BASE), hf.Qwen3Config(**BASE, head_dim=8)])
def test_target_start_reads_the_context_as_the_first_copied_layer_does(config: Any) -> None:
    of = target(config)
    drafter = start(of)
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Tap 3 is what layer 4 reads, the first of the last two.
        features = of.model(ids, output_hidden_states=True).hidden_states
        fused = drafter.hidden_norm(drafter.fc(torch.cat([features[2], features[4]], dim=-1)))
        layer: Any = drafter.layers[0]
        key, value = captured_keys(of, ids)
        torch.testing.assert_close(layer.self_attn.k_proj(fused), key, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.self_attn.v_proj(fused), value, rtol=1e-4, atol=1e-5)
    assert torch.equal(drafter.norm.weight, of.model.get_decoder().norm.weight)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in drafter.parameters())


def test_target_start_copies_qk_norms_where_the_target_has_them() -> None:
    of = target(hf.Qwen3Config(**BASE, head_dim=8))
    for layer, source in zip(start(of).layers, decoder_layers(of.model)[-2:], strict=True):
        torch.testing.assert_close(layer.get_parameter("self_attn.q_norm.weight"), source.self_attn.q_norm.weight)


def test_target_start_leaves_biases_behind() -> None:
    of = target(hf.Qwen2Config(**BASE))
    assert torch.equal(
        start(of).layers[1].get_parameter("mlp.up_proj.weight"), decoder_layers(of.model)[5].mlp.up_proj.weight
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.GemmaConfig(**BASE, head_dim=8), "use gelu"),
        (hf.Gemma2Config(**BASE, head_dim=8), "use gelu"),
        (hf.PhiConfig(**BASE), "use gelu"),
        (hf.MixtralConfig(**BASE, num_local_experts=4), "layers have mlp"),
        (hf.CohereConfig(**BASE), "no RMSNorms"),
        (hf.StableLmConfig(**BASE), "no RMSNorms"),
        (hf.Qwen3Config(**BASE | {"num_key_value_heads": 4}, head_dim=8), "k_proj.weight has shape"),
    ],
)
def test_target_start_is_refused_where_layers_compute_something_else(config: Any, why: str) -> None:
    of = target(config)
    if config.num_key_value_heads == 4 and "Qwen3" in type(config).__name__:
        of.model.config.num_key_value_heads = 2  # a file that does not fit its config
    with pytest.raises(ConfigMismatch, match=why) as caught:
        start(of)
    assert "drafter.init=random" in str(caught.value)


def test_norms_that_multiply_by_1_plus_weight_are_copied_by_what_they_do() -> None:
    of = target(hf.GemmaConfig(**BASE | {"hidden_act": "silu"}, head_dim=8, hidden_activation="silu"))
    of.model.config.hidden_act = "silu"
    drafter = start(of)
    theirs = of.model.get_decoder().norm
    x = torch.randn(3, 32)
    torch.testing.assert_close(drafter.norm(x), theirs(x))
