"""Taps, heads and mask tokens over tiny random targets of many architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash.config import DrafterConfig, TargetConfig
from dflash.errors import ConfigMismatch, TargetMismatch
from dflash.target.frozen import (
    Target,
    decoder_layers,
    drafter_shape,
    resolve_taps,
    spread_taps,
    stop_tokens,
    text_config,
)
from dflash.target.mask_token import find_mask_token

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
CONFIGS = {
    "llama": hf.LlamaConfig(**BASE),
    "llama, tied": hf.LlamaConfig(**BASE, tie_word_embeddings=True),
    "qwen2": hf.Qwen2Config(**BASE),
    "qwen3": hf.Qwen3Config(**BASE, head_dim=8),
    "gemma": hf.GemmaConfig(**BASE, head_dim=8),
    "gemma2, soft-capped": hf.Gemma2Config(**BASE, head_dim=8, sliding_window=8, final_logit_softcapping=0.5),
    "gemma3": hf.Gemma3TextConfig(**BASE, head_dim=8, sliding_window=8),
    "phi, head with bias": hf.PhiConfig(**BASE),
    "phi3": hf.Phi3Config(**BASE),
    "qwen3-moe": hf.Qwen3MoeConfig(**BASE, head_dim=8, **EXPERTS),
    "mixtral": hf.MixtralConfig(**BASE, num_local_experts=4),
    "qwen3-next, linear attention": hf.Qwen3NextConfig(**BASE, head_dim=8, **EXPERTS, **LINEAR),
    "granite, scaled head": hf.GraniteConfig(**BASE, logits_scaling=4.0),
    "cohere, scaled head": hf.CohereConfig(**BASE, logit_scale=0.25),
}
ALL = pytest.mark.parametrize("name", CONFIGS)
TAPS = (0, 1, 3)
IDS = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(0))


def model(name: str) -> Any:
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for parameter in made.parameters():
        if not parameter.any():
            nn.init.normal_(parameter)  # biases start at zero, where they would not be noticed
    return made


def run(made: Any, ids: Tensor = IDS) -> Any:
    with torch.no_grad():
        return made(ids, output_hidden_states=True, use_cache=False)


@ALL
def test_tap_i_is_hidden_states_i_plus_1_and_entry_0_the_embedding(name: str) -> None:
    made = model(name)
    out = run(made)
    features = Target(made, TAPS).features(IDS)
    assert len(out.hidden_states) == 6
    assert torch.equal(features, torch.cat([out.hidden_states[i + 1] for i in TAPS], dim=-1).bfloat16())
    embedding, _ = Target(made, TAPS).ends(torch.device("cpu"))
    if "granite" not in name:  # multiplies its embeddings after they are read
        assert torch.equal(embedding(IDS), out.hidden_states[0])


@ALL
def test_later_layers_norm_and_head_are_never_called(name: str) -> None:
    made = model(name)
    called: list[str] = []
    layers = decoder_layers(made)
    watched = {f"layer {i}": layer for i, layer in enumerate(layers)}
    watched |= {"head": made.get_output_embeddings()}
    final_norm = [m for n, m in made.get_decoder().named_children() if "norm" in n or "layernorm" in n]
    watched |= {f"norm {i}": norm for i, norm in enumerate(final_norm)}
    for key, module in watched.items():
        module.register_forward_pre_hook(lambda module, args, key=key: called.append(key))
    Target(made, (0, 2)).features(IDS)
    assert called == ["layer 0", "layer 1", "layer 2"]


@ALL
def test_head_gives_the_models_logits_from_the_final_state(name: str) -> None:
    made = model(name)
    target = Target(made, (0, 1), final=True)
    _, head = target.ends(torch.device("cpu"))
    features = target.features(IDS)
    assert features.shape[-1] == 3 * 32
    final = made.get_decoder()(IDS, use_cache=False).last_hidden_state
    assert torch.equal(features[..., 64:], final.bfloat16())
    logits = run(made).logits
    torch.testing.assert_close(head.logits(final), logits, rtol=1e-5, atol=1e-6)
    tiles = torch.cat([head.tile(final[0], start, min(start + 10, 64)) for start in range(0, 64, 10)], dim=-1)
    torch.testing.assert_close(tiles, logits[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "qwen3-next, linear attention"])
def test_right_padding_changes_no_real_position(name: str) -> None:
    target = Target(model(name), TAPS)
    alone = target.features(IDS[:1, :7])
    padded = torch.cat([IDS[:1, :7], torch.zeros(1, 9, dtype=torch.long)], dim=1)
    # Rounded to bfloat16, so a last bit of float32 may show as one of 8 bits.
    torch.testing.assert_close(target.features(padded)[:, :7], alone, rtol=2**-7, atol=1e-6)


def test_with_and_without_the_final_state() -> None:
    made = hf.LlamaForCausalLM(hf.LlamaConfig(**BASE | {"num_hidden_layers": 3})).eval()
    assert Target(made, (0, 1)).features(IDS).shape[-1] == 2 * 32
    assert Target(made, (0, 1), final=True).features(IDS).shape[-1] == 3 * 32
    assert len(run(made).hidden_states) == 4


@pytest.mark.parametrize("taps", [[-1], [4], [5], [], [2, 1], [1, 1]])
def test_only_ascending_layers_within_0_to_n_minus_2_are_taps(taps: list[int]) -> None:
    with pytest.raises(ConfigMismatch, match=r"within 0\.\.3"):
        resolve_taps(taps, 5)


def test_taps_of_the_published_formula() -> None:
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert resolve_taps(3, 30) == (1, 14, 27)
    assert resolve_taps(1, 30) == (15,)
    with pytest.raises(ConfigMismatch):
        resolve_taps(5, 6)  # more taps than layers between


def test_an_unknown_head_is_refused() -> None:
    made = model("llama")
    head = made.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(TargetMismatch, match="does more than scaling"):
        Target(made, TAPS).ends(torch.device("cpu"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model("llama, tied").save_pretrained(tmp_path)
    return tmp_path


def test_a_tied_head_equals_the_embedding(saved: Path) -> None:
    assert "lm_head.weight" not in load_file(saved / "model.safetensors")
    target = Target.load(TargetConfig(model=str(saved), dtype="float32"), TAPS, "cpu")
    embedding, head = target.ends(torch.device("cpu"))
    assert torch.equal(head.weight, embedding.weight)


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.4.mlp.up_proj.weight"])
def test_a_missing_weight_is_an_error(saved: Path, key: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors[key]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetMismatch, match="lacks 1 of the weights"):
        Target.load(TargetConfig(model=str(saved), dtype="float32"), TAPS, "cpu")


def shape(saved: Path, mask_token_id: int | None) -> int:
    config = TargetConfig(model=str(saved))
    drafter = DrafterConfig(taps=[1], mask_token_id=mask_token_id)
    return drafter_shape(drafter, text_config(config), stop_tokens(config)).mask_token_id


def test_a_missing_mask_token_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigMismatch, match="mask_token_id is not set"):
        shape(saved, None)


@pytest.mark.parametrize(("token", "meaning"), [(1, "bos_token_id"), (2, "eos_token_id"), (7, "end of turn")])
def test_the_mask_token_is_not_bos_eos_or_end_of_turn(saved: Path, token: int, meaning: str) -> None:
    hf.GenerationConfig(eos_token_id=[2, 7]).save_pretrained(saved)
    with pytest.raises(ConfigMismatch, match=meaning):
        shape(saved, token)


@pytest.mark.parametrize("token", [-1, 64, 999])
def test_the_mask_token_has_a_row_in_the_embedding(saved: Path, token: int) -> None:
    with pytest.raises(ConfigMismatch, match=r"has no row in the target's embedding of 64 rows"):
        shape(saved, token)


def test_an_existing_unused_row_is_taken_as_it_is(saved: Path) -> None:
    assert shape(saved, 63) == 63


def tokenizer(size: int, special: list[str], template: str | None = None, **names: str) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")), **names
    )
    made.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    made.chat_template = template
    return made


def test_mask_token_rule_own_then_free_row_then_highest_unused_special() -> None:
    config = CONFIGS["llama"]
    assert find_mask_token(tokenizer(10, ["<m>"], mask_token="<m>"), config, 64)[0] == 10  # type: ignore[index]
    assert find_mask_token(tokenizer(60, ["<a>"]), config, 64)[0] == 61  # type: ignore[index]
    full = tokenizer(60, ["<a>", "<b>", "<end>", "<turn>"], template="{{ '<turn>' }}")
    assert find_mask_token(full, config, 64, stop_ids={62})[0] == 61  # type: ignore[index]
    assert find_mask_token(tokenizer(64, []), config, 64) is None
