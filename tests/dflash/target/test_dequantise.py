"""A GGUF target becomes a directory that older libraries read alike."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decoding_toys import llama
from transformers import AutoConfig

import dflash.target.dequantise
from cache.json_file import read_json
from dflash.target.dequantise import dequantise


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 20_000.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_theta_stands_where_older_and_newer_readers_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any]
) -> None:
    """transformers 4 reads rope_theta and rope_scaling; without them it goes on with 10,000 and says nothing."""
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    model = llama(rope_parameters=rope)
    reads = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    monkeypatch.setattr(dflash.target.dequantise, "AutoModelForCausalLM", reads)
    tokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(save_pretrained=lambda path: None))
    monkeypatch.setattr(dflash.target.dequantise, "AutoTokenizer", tokenizer)
    directory = dequantise(file, tmp_path)
    config = read_json(directory / "config.json") or {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)
    assert config["rope_parameters"] == AutoConfig.from_pretrained(directory).rope_parameters == rope
