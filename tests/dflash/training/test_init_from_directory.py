"""A run that starts from an exported drafter: of any kind from a plain one, and of its own kind from any."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from decoding_toys import LOOKING_BACK, Toy, toy
from safetensors.torch import load_file, save_file

from dflash.config import DrafterConfig
from dflash.errors import CheckpointCorrupt, ConfigMismatch
from dflash.export.export import target_facts, write_layout
from dflash.export.written_out import written_out
from dflash.model.drafter import Drafter
from dflash.model.layouts import Layout, TargetFacts, layout_config
from dflash.target.frozen import drafter_shape
from dflash.training import checkpoint
from dflash.training.initial_drafter import load_drafter, new_drafter
from dflash.training.open_run import open_run

WINDOWS: dict[str, Any] = {"sliding_window": 5, "sliding_layers": [1]}


def exported(one: Toy, directory: Path, layout: Layout = "dflash") -> Path:
    drafter = written_out(one.drafter, one.ends)
    directory.mkdir()
    facts = target_facts("t", one.target.model.config, "float32")
    write_layout(directory, drafter, layout_config(layout, drafter.shape, facts))
    return directory


def started(of: Toy, init: Path, block_size: int = 4, **parts: Any) -> Drafter:
    config = DrafterConfig(layers=2, block_size=block_size, taps=[0, 2], mask_token_id=3, init=str(init), **parts)
    return new_drafter(drafter_shape(config, of.target.model.config), config, of.target, 0)


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize("parts", [{}, *LOOKING_BACK.values()], ids=["dflash", *LOOKING_BACK])
def test_a_plain_drafter_starts_any_kind_bit_for_bit(parts: dict[str, Any], layout: Layout, tmp_path: Path) -> None:
    windows = {name: value for name, value in parts.items() if "sliding" in name}
    plain = toy(7, dtype=torch.float32, **windows)
    new = started(plain, exported(plain, tmp_path / "export", layout), **parts)
    for name, tensor in plain.drafter.state_dict().items():
        assert torch.equal(new.state_dict()[name], tensor), name
    generator = torch.Generator().manual_seed(0)
    features, embedded = torch.randn(1, 9, 64, generator=generator), torch.randn(1, 2, 4, 32, generator=generator)
    anchor = torch.tensor([[3, 7]])
    assert torch.equal(new(features, embedded, anchor), plain.drafter(features, embedded, anchor))


@pytest.mark.parametrize(
    "parts",
    [{"kind": "dflash2", "rank": 6}, {"kind": "dspark", "rank": 6}, WINDOWS],
    ids=["dflash2", "dspark", "windows"],
)
def test_a_kind_goes_on_from_its_own_export(parts: dict[str, Any], tmp_path: Path) -> None:
    one = toy(7, dtype=torch.float32, **parts)
    published = written_out(one.drafter, one.ends)
    free = {"tables": "free"} if "rank" in parts else {}
    again = started(one, exported(one, tmp_path / "export"), **parts | free)
    assert again.state_dict().keys() == published.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in published.state_dict().items())


def test_published_files_bring_the_targets_ends_and_other_keys(tmp_path: Path) -> None:
    one = toy(7, dtype=torch.float32)
    directory = exported(one, tmp_path / "export")
    tensors = load_file(directory / "model.safetensors") | {"lm_head.weight": torch.zeros(24, 32)}
    save_file({name: value.bfloat16() for name, value in tensors.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config |= {"transformers_version": "9", "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    rounded = started(one, directory, block_size=6).fc.weight
    assert torch.equal(rounded, one.drafter.fc.weight.bfloat16().float())


def test_what_does_not_fit_is_refused_by_its_field(tmp_path: Path) -> None:
    plain, spark = (toy(7, dtype=torch.float32, **parts) for parts in ({}, {"kind": "dspark", "rank": 6}))
    directory = exported(plain, tmp_path / "plain")
    with pytest.raises(ConfigMismatch, match=r"nowhere: .*Name random, target, or a directory"):
        started(plain, tmp_path / "nowhere")
    config = DrafterConfig(layers=1, block_size=4, taps=[0, 2], mask_token_id=3, init=str(directory))
    with pytest.raises(ConfigMismatch, match=r"drafter\.layers 2, this run 1"):
        new_drafter(drafter_shape(config, plain.target.model.config), config, plain.target, 0)
    with pytest.raises(ConfigMismatch, match=r"kind dspark .* drafter\.tables=free and drafter\.rank=6"):
        started(plain, exported(spark, tmp_path / "spark"))
    with pytest.raises(ConfigMismatch, match=r"markov_w1.* is \(24, 6\), expected \(24, 5\)"):
        started(plain, tmp_path / "spark", kind="dspark", rank=5, tables="free")
    tensors = load_file(directory / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if name != "fc.weight"}, directory / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match=r"missing \['fc.weight'\]"):
        started(plain, directory)


def test_a_run_keeps_where_it_started_from(make_run: Any, tokens: Path) -> None:
    first = make_run("first", epochs=1)
    tiny.run(["train", first, "--tokens", tokens], first / "log")
    shape, newest = open_run(first, tokens).shape, checkpoint.best(first / "checkpoints")
    assert newest is not None
    (first / "export").mkdir()
    config = layout_config("dflash", shape, TargetFacts("t", [], None, None, "float32"))
    write_layout(first / "export", load_drafter(shape, newest), config)
    settings = {"init": str(first / "export"), "kind": "dspark", "rank": 4}
    next_one = make_run("next", epochs=1, drafter=settings)
    tiny.run(["train", next_one, "--tokens", tokens], next_one / "log")
    history = [json.loads(line) for line in (next_one / "history.jsonl").read_text().splitlines()]
    (start,) = [line for line in history if line["event"] == "drafter"]
    assert start["init"] == str(first / "export" / "model.safetensors")
    assert len(start["checksum"]) == 32
    before = load_file(next_one / "checkpoints" / "epoch-000-step-000000" / "drafter.safetensors")
    after = tiny.weights(first)
    assert all(torch.equal(before[name], after[f"drafter.{name}"]) for name in before if "markov" not in name)
