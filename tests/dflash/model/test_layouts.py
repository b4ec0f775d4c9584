"""Served layouts: what is written is read back, by this project and by a second reader; ids are practice cases."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from decoding_toys import llama, toy
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash.errors import CheckpointCorrupt, ConfigMismatch, DflashError
from dflash.model.drafter import DrafterShape
from dflash.model.layouts import Layout, TargetFacts, check_config, layout_config, read_config, read_drafter

FACTS = TargetFacts("some/target", ["LlamaForCausalLM"], 0, [2, 5], "float32")
LAYOUTS: list[Layout] = ["dflash", "speculators"]


def shape(**changes: Any) -> DrafterShape:
    return dataclasses.replace(toy(dtype=torch.float32).drafter.shape, **changes)


def paths(config: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += paths(value, (*before, key))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_says_everything_and_is_read_back(layout: Layout) -> None:
    wanted = shape(block_size=8, taps=(0, 2))
    config = layout_config(layout, wanted, FACTS)
    assert read_config(config) == check_config(config) == wanted
    layers = config if layout == "dflash" else config["transformer_layer_config"]
    assert layers["is_causal"] is False
    assert config["block_size"] == 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_removing_any_key_is_noticed(layout: Layout) -> None:
    config, tensors = layout_config(layout, shape(), FACTS), toy(dtype=torch.float32).drafter.state_dict()
    for path in paths(config):
        other = copy.deepcopy(config)
        place = other
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(ConfigMismatch, match=r"has no|contradict"):
            read_drafter(other, tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", True), ("attention_bias", True), ("hidden_act", "gelu"), ("use_sliding_window", True),
        ("tie_word_embeddings", True), ("layer_types", ["sliding_attention", "full_attention"]), ("dtype", "float16"),
        ("model_type", "llama"), ("max_window_layers", 9), ("rope_theta", 7.0), ("rope_scaling", {"rope_type": "yarn"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_that_means_another_drafter_is_refused(layout: Layout, key: str, value: Any) -> None:
    config = layout_config(layout, shape(), FACTS)
    layers = config if layout == "dflash" else config["transformer_layer_config"]
    layers[key] = value
    with pytest.raises(ConfigMismatch, match=f"{key}"):
        check_config(config)


def test_top_level_and_nested_are_read_alike_and_a_conflict_is_an_error() -> None:
    config = layout_config("dflash", shape(), FACTS)
    older = copy.deepcopy(config)
    del older["dflash_config"]["block_size"]
    newer = copy.deepcopy(config)
    del newer["block_size"]
    flat = {**copy.deepcopy(config), **config["dflash_config"]}
    del flat["dflash_config"]
    assert read_config(older) == read_config(newer) == read_config(flat) == shape()
    config["block_size"] += 1
    with pytest.raises(ConfigMismatch, match="block_size is 5 at the top and 4 in dflash_config"):
        read_config(config)


def test_block_of_8_means_7_drafts_everywhere() -> None:
    eight = shape(block_size=8)
    speculators = layout_config("speculators", eight, FACTS)
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert speculators["block_size"] == layout_config("dflash", eight, FACTS)["block_size"] == 8
    assert speculators["sample_from_anchor"] is False


def test_no_server_takes_the_block_for_causal() -> None:
    """vLLM 0.26 and 0.27 know sliding_window_non_causal alone, later ones and the dflash layout is_causal."""
    speculators = layout_config("speculators", shape(), FACTS)
    assert speculators["sliding_window_non_causal"] is True
    assert speculators["transformer_layer_config"]["is_causal"] is False
    assert layout_config("dflash", shape(), FACTS)["is_causal"] is False


def test_tap_i_is_hidden_states_i_plus_1_on_both_sides() -> None:
    """A target of 4 layers: 5 hidden states, entry 0 the embedding. The files say how they count."""
    one = toy(dtype=torch.float32)
    ids = torch.tensor([[4, 9, 6]])
    states = one.target.model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 5
    assert torch.equal(states[0], one.target.model.get_input_embeddings()(ids))
    seen: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(one.target.model.get_decoder().layers):
        layer.register_forward_hook(
            lambda m, a, out, i=i: seen.__setitem__(i, out[0] if isinstance(out, tuple) else out)
        )
    one.target.model(ids)
    features = one.target.features(ids)
    for layout, key in (("dflash", "target_layer_ids"), ("speculators", "aux_hidden_state_layer_ids")):
        config = layout_config(layout, one.drafter.shape, FACTS)  # type: ignore[arg-type]
        place = config["dflash_config"] if layout == "dflash" else config
        written = place[key]
        entries = written if layout == "speculators" else [tap + 1 for tap in written]
        expected = torch.cat([states[entry] for entry in entries], dim=-1)
        assert torch.equal(features, expected.bfloat16())
        assert all(torch.equal(states[entry], seen[entry - 1]) for entry in entries)
        assert "hidden_states[" in place[f"{key}_are"]
    assert layout_config("dflash", one.drafter.shape, FACTS)["dflash_config"]["target_layer_ids"] == [0, 2]
    assert layout_config("speculators", one.drafter.shape, FACTS)["aux_hidden_state_layer_ids"] == [1, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6,
        },
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500000.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_positions_survive_and_a_second_reader_has_the_same(layout: Layout, rope: dict[str, Any]) -> None:
    wanted = shape(rope_parameters=rope)
    config = layout_config(layout, wanted, FACTS)
    layers = config if layout == "dflash" else config["transformer_layer_config"]
    assert read_config(config).rope_parameters == rope
    older = {key: value for key, value in layers.items() if key != "rope_parameters"}
    newer = {key: value for key, value in layers.items() if key not in ("rope_theta", "rope_scaling")}
    frequencies = []
    for seen in (layers, older, newer):
        known = {k: v for k, v in seen.items() if k not in ("architectures", "dflash_config", "is_causal")}
        frequencies.append(Qwen3RotaryEmbedding(Qwen3Config(**copy.deepcopy(known))).inv_freq)
    ours = read_drafter(config, toy(dtype=torch.float32).drafter.state_dict()).rope
    assert all(torch.equal(one, ours.inverse) for one in frequencies)


def test_an_unknown_rope_type_is_an_error_and_a_contradiction_too() -> None:
    config = layout_config("dflash", shape(rope_parameters={"rope_type": "foo", "rope_theta": 1e4}), FACTS)
    with pytest.raises(DflashError, match="foo"):
        read_drafter(config, toy(dtype=torch.float32).drafter.state_dict())
    config = layout_config("dflash", shape(), FACTS)
    config["rope_theta"] = 5.0
    with pytest.raises(ConfigMismatch, match=r"rope_parameters .* contradict"):
        read_config(config)


def test_a_tied_target_gives_an_untied_drafter_without_a_head() -> None:
    one = toy(dtype=torch.float32, model=llama(tie_word_embeddings=True))
    assert torch.equal(one.ends[1].weight, one.target.model.get_input_embeddings().weight)
    for layout in LAYOUTS:
        config = layout_config(layout, one.drafter.shape, FACTS)
        assert config["tie_word_embeddings"] is False
        loaded = read_drafter(config, one.drafter.state_dict())
        assert not [name for name in loaded.state_dict() if "lm_head" in name or "embed" in name]


def test_missing_extra_or_other_tensors_are_errors() -> None:
    one = toy(dtype=torch.float32)
    config, tensors = layout_config("dflash", one.drafter.shape, FACTS), one.drafter.state_dict()
    for name in tensors:
        with pytest.raises(CheckpointCorrupt, match=rf"missing \['{name}'\]"):
            read_drafter(config, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(CheckpointCorrupt, match=name):
            read_drafter(config, tensors | {name: tensors[name][..., :-1]})
    with pytest.raises(CheckpointCorrupt, match=r"unexpected \['lm_head.weight'\]"):
        read_drafter(config, tensors | {"lm_head.weight": torch.zeros(3)})
    with pytest.raises(CheckpointCorrupt, match="bfloat16"):
        read_drafter(config, tensors | {"fc.weight": tensors["fc.weight"].bfloat16()})
