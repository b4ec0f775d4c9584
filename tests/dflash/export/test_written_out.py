"""Drafters that look back leave as published ones: tables of the whole vocabulary, names and keys that servers read."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_toys import LOOKING_BACK, toy
from safetensors.torch import load_file, save_file

from dflash.decoding.decode import draft_logits
from dflash.errors import CheckpointCorrupt
from dflash.export.export import gate, target_facts, write_layout
from dflash.export.written_out import probe, written_out
from dflash.model.drafter_loss import slot_logits
from dflash.model.layouts import Layout, layout_config, load_exported, read_drafter

NAMES = {
    "dflash2": {
        f"candidate_selector.{name}"
        for name in ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
    }
    | {
        f"layers.{layer}.{conv}.{name}"
        for layer in (0, 1)
        for conv in ("attention_conv", "mlp_conv")
        for name in ("base_kernel", "kernel_projection.weight")
    },
    "dspark": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"},
}


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize(
    "parts",
    [*LOOKING_BACK.values(), {"kind": "dspark", "rank": 6, "confidence": True}],
    ids=[*LOOKING_BACK, "dspark with confidence"],
)
def test_a_drafter_that_looks_back_passes_the_gate_and_drafts_alike(
    parts: dict[str, Any], layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = toy(dtype=torch.float32, **parts)

    def load(command: list[str], **_: Any) -> Any:  # the gate's child, without its start-up of seconds
        with torch.no_grad():
            save_file(probe(load_exported(Path(command[-2]))), command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("dflash.export.export.subprocess.run", load)
    published = written_out(one.drafter, one.ends)
    config = layout_config(layout, published.shape, target_facts("target", one.target.model.config, "float32"))
    write_layout(tmp_path, published, config)
    assert gate(published, one.ends[1], tmp_path) == 0.0
    plain = {name for name in load_file(tmp_path / "model.safetensors") if name in toy().drafter.state_dict()}
    gate_and_guess = {"gate.weight", "gate.bias", "proj.weight", "proj.bias"}
    own = {
        n for n in load_file(tmp_path / "model.safetensors").keys() - plain if n.split(".", 1)[1] not in gate_and_guess
    }
    assert own == NAMES[parts["kind"]]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        {"dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}[parts["kind"]]
    ]
    loaded = load_exported(tmp_path)
    assert loaded.shape == published.shape
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (slot_logits(d, one.ends, hidden, torch.arange(9)) for d in (one.drafter, loaded))
    drafted = ours.isfinite()  # of all ids, or of a small vocabulary
    torch.testing.assert_close(ours[drafted], theirs[drafted], rtol=1e-5, atol=1e-4)
    assert (theirs[~drafted] < -1e3).all()
    features = one.target.features(torch.arange(4, 12)[None]).float()
    pair = [draft_logits(d, one.ends, d.context(features), [5], [8]) for d in (one.drafter, loaded)]
    torch.testing.assert_close(*pair)
    tensors = load_file(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match="missing"):
        read_drafter(config, {name: value for name, value in tensors.items() if name != sorted(own)[0]})
