"""Export: a fresh process loads the trainer's drafter, to the bit, or nothing is written; ids are practice cases."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_toys import STOP, Toy, llama, save_tokenizer, toy
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig

import dflash.export.export
from dflash.errors import CheckpointCorrupt, ConfigMismatch, TargetMismatch
from dflash.export.export import (
    export,
    gate,
    refuse_other_ends,
    refuse_silent_losses,
    target_facts,
    write_layout,
)
from dflash.export.written_out import probe
from dflash.model.head import Head
from dflash.model.layouts import layout_config, load_exported
from dflash.training import checkpoint
from dflash.training.checkpoint import State


@pytest.fixture
def one() -> Toy:
    return toy(dtype=torch.float32)


def config_of(one: Toy, layout: Any = "dflash", dtype: str = "float32") -> dict[str, Any]:
    return layout_config(layout, one.drafter.shape, target_facts("some/target", one.target.model.config, dtype))


@pytest.fixture
def run(tmp_path: Path, one: Toy) -> Path:
    """A run of one checkpoint, of a drafter for a target on disk."""
    one.target.model.save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    path = tmp_path / "run"
    path.mkdir()
    shape = one.drafter.shape
    tree = {
        "target": {"model": str(tmp_path / "target"), "dtype": "float32"},
        "drafter": {"layers": 2, "block_size": 4, "taps": list(shape.taps), "mask_token_id": shape.mask_token_id},
        "export": {"layouts": ["dflash", "speculators"]},
    }
    (path / "config.json").write_text(json.dumps(tree))
    state = State(epoch=1, step=0, steps_total=3, settings={}, threads=1)
    checkpoint.save(path / "checkpoints", state, dict(one.drafter.state_dict()), {})
    return path


def in_this_process(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None] = lambda directory: None) -> None:
    """The gate's child without its start-up of seconds; `change` may damage what was written before it is loaded."""

    class Done:
        returncode, stderr = 0, ""

    def load(command: list[str], **_: Any) -> Done:
        from safetensors.torch import save_file

        change(Path(command[-2]))
        with torch.no_grad():
            save_file(probe(load_exported(Path(command[-2]))), command[-1])
        return Done()

    monkeypatch.setattr(dflash.export.export.subprocess, "run", load)


def test_every_layout_is_reloaded_in_a_fresh_process(run: Path, one: Toy) -> None:
    tree = json.loads((run / "config.json").read_text())
    tree["export"]["layouts"].append("gguf")
    (run / "config.json").write_text(json.dumps(tree))
    export(run)
    said = json.loads((run / "export.json").read_text())
    assert said["layout"] == "dflash"
    assert said["max_logit_difference"] == 0.0
    assert list(said["layouts"]) == ["dflash", "speculators", "gguf"]
    gguf = said["layouts"].pop("gguf")
    assert gguf["max_logit_difference"] == 0.0
    assert gguf["type"] == "float16"
    assert [Path(gguf[what]).name for what in ("drafter", "target")] == ["drafter.gguf", "target.gguf"]
    assert {str(file) for file in (run / "export" / "gguf").glob("*.gguf")} == {gguf["drafter"], gguf["target"]}
    for layout, facts in said["layouts"].items():
        directory = run / "export" / layout
        assert facts["path"] == str(directory)
        assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors", "origin.json"]
        assert facts["size_bytes"] == sum(file.stat().st_size for file in directory.iterdir())
        tensors = load_file(directory / "model.safetensors")
        assert tensors.keys() == one.drafter.state_dict().keys()
        assert all(torch.equal(tensors[name], value) for name, value in one.drafter.state_dict().items())
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        with torch.no_grad():
            assert torch.equal(probe(load_exported(directory))["hidden"], probe(one.drafter)["hidden"])


def test_what_another_run_or_nobody_known_wrote_is_not_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for path in (run, other):
        tree = json.loads((path / "config.json").read_text())
        tree["export"] = {"layouts": ["dflash"], "path": str(tmp_path / "served")}
        (path / "config.json").write_text(json.dumps(tree))
    for _ in range(2):
        export(run)  # its own is replaced
    before = {file.name: file.read_bytes() for file in (tmp_path / "served/dflash").iterdir()}
    with pytest.raises(ConfigMismatch, match=f"the run {run.resolve()} wrote it"):
        export(other)
    assert {file.name: file.read_bytes() for file in (tmp_path / "served/dflash").iterdir()} == before
    shutil.rmtree(tmp_path / "served/dflash")
    (tmp_path / "served/dflash").mkdir()
    (tmp_path / "served/dflash/thesis.txt").write_text("x")
    with pytest.raises(ConfigMismatch, match="no run of ours wrote it"):
        export(other)
    assert (tmp_path / "served/dflash/thesis.txt").exists()


def test_a_drafter_of_another_target_is_not_exported(run: Path, one: Toy) -> None:
    state = State(epoch=2, step=0, steps_total=6, settings={"target.model": "another"}, threads=1)
    checkpoint.save(run / "checkpoints", state, dict(one.drafter.state_dict()), {})
    with pytest.raises(TargetMismatch, match="trained for another target"):
        export(run)


def test_the_checkpoint_with_the_best_tau_is_exported(run: Path, one: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    best = {"tau": 1.5, "checkpoint": "epoch-001-step-000000"}
    state = State(epoch=2, step=0, steps_total=6, settings={}, threads=1, best=best)
    other = {name: value + 1 for name, value in one.drafter.state_dict().items()}
    checkpoint.save(run / "checkpoints", state, other, {})
    export(run)
    said = json.loads((run / "export.json").read_text())
    assert Path(said["checkpoint"]).name == best["checkpoint"]
    assert torch.equal(load_exported(Path(said["path"])).fc.weight, one.drafter.fc.weight)


@pytest.mark.parametrize(("token", "why"), [(None, "mask_token_id is not set"), (7, "is the target's end of turn")])
def test_export_refuses_a_missing_mask_token_and_an_end_of_turn(run: Path, token: int | None, why: str) -> None:
    GenerationConfig(eos_token_id=[STOP, 7]).save_pretrained(run.parent / "target")
    tree = json.loads((run / "config.json").read_text())
    tree["drafter"]["mask_token_id"] = token
    (run / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigMismatch, match=why):
        export(run)
    assert not (run / "export").exists()


def test_nothing_is_left_under_the_final_name_when_the_gate_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(directory: Path) -> None:
        from safetensors.torch import save_file

        tensors = load_file(directory / "model.safetensors")
        tensors["layers.1.self_attn.v_proj.weight"] = tensors["layers.1.self_attn.v_proj.weight"] * 1.01
        save_file(tensors, directory / "model.safetensors")

    in_this_process(monkeypatch, damage)
    with pytest.raises(CheckpointCorrupt, match=r"differs from the trainer's by .* Nothing was exported"):
        export(run)
    assert [path.name for path in (run / "export").iterdir()] == [".dflash.lock"]
    assert not (run / "export.json").exists()


def test_a_fresh_process_that_cannot_load_is_an_error(
    tmp_path: Path, one: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_layout(tmp_path, one.drafter, config_of(one))
    failed = SimpleNamespace(returncode=2, stderr="no such layer")
    monkeypatch.setattr(dflash.export.export.subprocess, "run", lambda command, **_: failed)
    with pytest.raises(CheckpointCorrupt, match=r"fresh process could not load .*no such layer"):
        gate(one.drafter, one.ends[1], tmp_path)


def test_the_drafter_is_written_in_the_targets_dtype(run: Path, one: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang resolves each model by itself: float32 becomes float16, beside a bfloat16 target."""
    in_this_process(monkeypatch)
    tree = json.loads((run / "config.json").read_text())
    tree["target"]["dtype"] = "bfloat16"
    (run / "config.json").write_text(json.dumps(tree))
    export(run)
    for layout in ("dflash", "speculators"):
        directory = run / "export" / layout
        config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        said = {config["dtype"], config.get("transformer_layer_config", config)["dtype"]}
        assert said == {"bfloat16"}
        assert all(torch.equal(tensors[name], value.bfloat16()) for name, value in one.drafter.state_dict().items())
        config["dtype"] = config.get("transformer_layer_config", config)["dtype"] = "float32"
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointCorrupt, match=r"is torch.bfloat16 .* config.json means torch.float32"):
            load_exported(directory)


def test_a_value_beyond_fp16_survives(tmp_path: Path, one: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    with torch.no_grad():
        one.drafter.hidden_norm.weight[0] = 99840.0  # exact in bfloat16, infinite in float16
    write_layout(tmp_path, one.drafter, config_of(one))
    gate(one.drafter, one.ends[1], tmp_path)
    assert float(load_file(tmp_path / "model.safetensors")["hidden_norm.weight"][0]) == 99840.0


def test_a_transposed_weight_is_made_contiguous(tmp_path: Path, one: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    weight = one.drafter.fc.weight
    one.drafter.fc.weight = nn.Parameter(weight.detach().t().contiguous().t())
    assert not one.drafter.fc.weight.is_contiguous()
    write_layout(tmp_path, one.drafter, config_of(one))
    assert gate(one.drafter, one.ends[1], tmp_path) == 0.0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["fc.weight"], weight)


def test_every_tensor_moves_the_logits(one: Toy) -> None:
    head = one.ends[1]
    with torch.no_grad():
        before = head.logits(probe(one.drafter)["hidden"])
        for name, parameter in one.drafter.named_parameters():
            parameter += 1
            assert float((head.logits(probe(one.drafter)["hidden"]) - before).abs().max()) > 1e-3, name
            parameter -= 1


def test_a_tensor_without_a_part_in_the_logits_is_not_exported(one: Toy) -> None:
    tensors = {name: value.clone() for name, value in one.drafter.state_dict().items()}
    refuse_silent_losses(config_of(one), tensors)
    for name in tensors:
        if name.startswith("layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    with pytest.raises(CheckpointCorrupt, match=r"does not use \[.*layers.1.mlp.gate_proj.weight"):
        refuse_silent_losses(config_of(one), tensors)


def test_the_gate_notices_a_reader_that_forgives(one: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading stopped checking keys or tensors, nothing could be exported any more."""
    tensors = dict(one.drafter.state_dict())
    monkeypatch.setattr(dflash.export.export, "check_config", lambda config: one.drafter.shape)
    with pytest.raises(CheckpointCorrupt, match=r"would load without \['architectures'"):
        refuse_silent_losses(config_of(one), tensors)
    monkeypatch.undo()
    monkeypatch.setattr(dflash.export.export, "check_tensors", lambda shape, tensors, dtype: None)
    with pytest.raises(CheckpointCorrupt, match=r"would load without \['fc.weight'"):
        refuse_silent_losses(config_of(one), tensors)


def test_speculators_layout_is_refused_where_bare_weights_are_not_the_targets_ends(one: Toy) -> None:
    embedding, head = one.ends
    refuse_other_ends(embedding, head)

    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    with pytest.raises(TargetMismatch, match="embedding is scaled"):
        refuse_other_ends(Scaled(24, 32), head)
    with pytest.raises(TargetMismatch, match="head has a bias"):
        refuse_other_ends(embedding, Head(head.weight, torch.zeros(24)))


def test_a_tied_targets_head_is_its_embedding() -> None:
    one = toy(dtype=torch.float32, model=llama(tie_word_embeddings=True))
    hidden = torch.randn(2, 32)
    expected = hidden @ one.target.model.get_input_embeddings().weight.T
    torch.testing.assert_close(one.ends[1].logits(hidden), expected)
