"""GGUF for llama.cpp: what is written is read back to the bit, by us and by transformers; any change is noticed."""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_toys import VOCABULARY, Toy, llama, save_tokenizer, toy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash.config import RunConfig, TargetConfig
from dflash.errors import CheckpointCorrupt, ConfigMismatch, TargetMismatch
from dflash.export.gguf_drafter import drafter_keys, drafter_of, drafter_tensors, load_gguf_drafter, rounded_drafter
from dflash.export.gguf_file import Contents, read_gguf, read_keys, write_gguf
from dflash.export.gguf_layout import refuse_differences, write_gguf_layout
from dflash.export.gguf_tokenizer import tokenizer_keys
from dflash.export.written_out import probe, written_out

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def qwen3() -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=128, max_position_embeddings=128, initializer_range=0.4,
        )
    )  # fmt: skip


@pytest.fixture
def one() -> Toy:
    return toy(dtype=torch.float32)


def written(directory: Path, one: Toy, wanted: Any = "float16") -> Path | None:
    place = directory / "target"
    one.target.model.save_pretrained(place)
    save_tokenizer(place)
    directory.joinpath("gguf").mkdir()
    config = TargetConfig(model=str(place), dtype="float32")
    return write_gguf_layout(directory / "gguf", one.drafter, one.target.model, config, wanted)


@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16", "q8_0"])
def test_the_drafter_is_the_trainers_rounded_once(tmp_path: Path, one: Toy, wanted: Any) -> None:
    written(tmp_path, one, wanted)
    file = tmp_path / "gguf" / "drafter.gguf"
    with torch.no_grad():
        ours, theirs = probe(rounded_drafter(one.drafter, wanted))["hidden"], probe(load_gguf_drafter(file))["hidden"]
        assert torch.equal(ours, theirs)
        assert torch.equal(theirs, probe(one.drafter)["hidden"]) == (wanted == "float32")
    types = read_gguf(file).types
    assert types["output_norm.weight"] == types["blk.1.attn_q_norm.weight"] == "F32"
    assert types["fc.weight"] == {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[wanted]
    assert types["blk.0.ffn_down.weight"] != "Q8_0"  # its rows of 48 are no whole blocks


@pytest.mark.parametrize(
    ("kind", "keys", "tensors"),
    [
        ("dspark", {"dflash.markov_rank": 6}, {"markov_w1.weight", "markov_w2.weight"}),
        (
            "dflash2",
            {
                "dflash.conv_kernel_size": 2,
                "dflash.conv_group_size": 16,
                "dflash.selector_rank": 6,
                "dflash.selector_top_k": 16,
            },
            {
                *(f"selector_{part}.weight" for part in ("predecessor", "successor", "hidden")),
                *(f"blk.1.{part}_conv_{name}" for part in ("attn", "ffn") for name in ("base", "proj.weight")),
            },
        ),
    ],
)
def test_a_drafter_that_looks_back_is_read_back_whole(
    tmp_path: Path, kind: Any, keys: dict[str, int], tensors: set[str]
) -> None:
    one = toy(dtype=torch.float32, kind=kind, rank=6)
    out = replace(one, drafter=written_out(one.drafter, one.ends))
    written(tmp_path, out)
    file = tmp_path / "gguf" / "drafter.gguf"
    assert keys.items() <= read_keys(file).items()
    found = read_gguf(file)
    assert tensors <= found.tensors.keys()
    assert {found.types[name] for name in tensors if name.endswith("_base")} <= {"F32"}
    with torch.no_grad():
        ours, theirs = probe(rounded_drafter(out.drafter, "float16")), probe(load_gguf_drafter(file))
    assert ours.keys() == theirs.keys() == {"hidden", "bonus"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_keys_mean_what_llama_cpp_reads(tmp_path: Path, one: Toy) -> None:
    written(tmp_path, one)
    keys = read_keys(tmp_path / "gguf" / "drafter.gguf")
    assert keys["general.architecture"] == "dflash"
    assert keys["dflash.target_layers"] == [1, 3]  # taps 0 and 2: the layer whose input is read
    assert keys["dflash.block_size"] == 4
    assert keys["dflash.sample_from_anchor"] is False
    assert keys["dflash.attention.causal"] is False
    assert keys["tokenizer.ggml.mask_token_id"] == one.drafter.shape.mask_token_id
    assert len(keys["tokenizer.ggml.tokens"]) == VOCABULARY


def test_a_changed_or_missing_key_or_tensor_is_noticed(one: Toy, tmp_path: Path) -> None:
    keys, tensors = drafter_keys(one.drafter.shape, {"tokenizer.ggml.model": "gpt2"}), drafter_tensors(one.drafter)
    write_gguf(tmp_path / "drafter.gguf", keys, tensors, "float16")
    right = read_gguf(tmp_path / "drafter.gguf")

    def check(keys_: dict[str, Any], tensors_: dict[str, torch.Tensor]) -> None:
        refuse_differences("drafter.gguf", Contents(keys_, right.types, tensors_), keys, tensors, "float16")

    check(right.keys, right.tensors)
    for key, value in right.keys.items():
        lacking = {name: one for name, one in right.keys.items() if name != key}
        for changed in (right.keys | {key: other_than(value)}, lacking):
            with pytest.raises(CheckpointCorrupt, match=rf"\['{key}'\] differ"):
                check(changed, right.tensors)
        if key.startswith("dflash.") or "mask" in key:
            with pytest.raises(ConfigMismatch, match=f"drafter.gguf has no {key}"):
                drafter_of(Contents(lacking, right.types, right.tensors))
    for name, tensor in right.tensors.items():
        moved = tensor.clone()
        moved.view(-1)[-1] += 0.01
        lacking = {other: one for other, one in right.tensors.items() if other != name}
        for changed in (right.tensors | {name: moved}, right.tensors | {name: tensor[:-1]}, lacking):
            with pytest.raises(CheckpointCorrupt, match=rf"\['{name}'\] differ"):
                check(right.keys, changed)
        with pytest.raises(CheckpointCorrupt, match=f"missing .*{name}"):
            drafter_of(Contents(right.keys, right.types, lacking))
    more = right.tensors | {"output.weight": torch.zeros(1)}
    with pytest.raises(CheckpointCorrupt, match=r"\['output.weight'\] differ"):
        check(right.keys, more)


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return [*value, 9] if isinstance(value, list) else "other" if isinstance(value, str) else 2 * value + 1


@pytest.mark.parametrize(
    "model", [llama, lambda: llama(tie_word_embeddings=True), qwen3], ids=["llama", "tied", "qwen3"]
)
def test_transformers_reads_the_target_as_it_was(tmp_path: Path, model: Any) -> None:
    """A second reader, which undoes llama.cpp's permutation by its own code."""
    one = toy(dtype=torch.float32, model=model())
    assert written(tmp_path, one, "float32") is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="target.gguf", dtype=torch.float32)
    before, after = one.target.model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.tensor([[4, 9, 6, 11]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, one.target.model(ids).logits, rtol=0, atol=1e-5)


def test_a_target_that_came_as_gguf_is_named_and_not_written_again(tmp_path: Path, one: Toy) -> None:
    written(tmp_path, one)
    original = tmp_path / "gguf" / "target.gguf"
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    (tmp_path / "target" / "source.json").write_text(json.dumps({"path": str(original), "sha256": digest}))
    config = TargetConfig(model=str(tmp_path / "target"), dtype="float32")
    again = tmp_path / "again"
    again.mkdir()
    assert write_gguf_layout(again, one.drafter, one.target.model, config, "float16") == original
    assert [file.name for file in again.iterdir()] == ["drafter.gguf"]
    assert read_keys(again / "drafter.gguf") == read_keys(tmp_path / "gguf" / "drafter.gguf")
    (tmp_path / "target" / "source.json").write_text(json.dumps({"path": str(original), "sha256": "of another file"}))
    (again / "drafter.gguf").unlink()
    assert write_gguf_layout(again, one.drafter, one.target.model, config, "float16") is None


def test_what_llama_cpp_was_not_tried_with_is_refused(tmp_path: Path, one: Toy) -> None:
    with torch.no_grad():
        one.drafter.fc.weight[0, 0] = 99840.0
    with pytest.raises(ConfigMismatch, match=r"fc.weight holds 9.984e\+04, more than float16 can"):
        write_gguf(tmp_path / "a.gguf", {"general.architecture": "dflash"}, drafter_tensors(one.drafter), "float16")
    yarn = copy.copy(one.drafter)
    object.__setattr__(yarn.shape, "rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4})
    with pytest.raises(TargetMismatch, match=r"this target has llama3.*convert_hf_to_gguf.py"):
        drafter_keys(yarn.shape, {})
    other = toy(dtype=torch.float32)
    other.target.model.config.model_type = "gemma3"
    with pytest.raises(TargetMismatch, match=r"this one is gemma3.*convert_hf_to_gguf.py"):
        written(tmp_path, other)


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        ([{"type": "Split", "pattern": {"Regex": WORDS + r"\p{N}" + REST}}], "qwen2"),
        ([{"type": "Split", "pattern": {"Regex": WORDS + r"\p{N}{1,3}" + REST}}], "llama-bpe"),
        ([{"type": "Digits", "individual_digits": True}], "smollm"),
        ([], "gpt-2"),
        ([{"type": "Split", "pattern": {"Regex": r"\d+"}}], None),
        ([{"type": "Whitespace"}], None),
    ],
)
def test_the_way_of_splitting_words_has_llama_cpps_name_or_is_refused(
    tmp_path: Path, pre: list[dict[str, Any]], name: str | None
) -> None:
    parts = [{"behavior": "Isolated", "invert": False} | part if part["type"] == "Split" else part for part in pre]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    whole = [*parts, last | {"use_regex": not any(part["type"] == "Split" for part in parts)}]
    save_tokenizer(tmp_path, {"type": "Sequence", "pretokenizers": whole})
    if name is None:
        with pytest.raises(TargetMismatch, match=r"cannot write the tokenizer .*convert_hf_to_gguf.py"):
            tokenizer_keys(tmp_path, VOCABULARY, "some/target")
        return
    keys = tokenizer_keys(tmp_path, VOCABULARY, "some/target")
    assert keys["tokenizer.ggml.pre"] == name
    assert keys["tokenizer.ggml.eos_token_id"] == 2
    assert keys["tokenizer.ggml.tokens"][2:6] == ["<end>", "[PAD3]", "e", "f"]
    assert keys["tokenizer.ggml.token_type"][2:6] == [3, 5, 1, 1]
    assert keys["tokenizer.ggml.merges"] == ["e f"]
    assert keys["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize(
    "drafter",
    [{"sliding_window": 2048}, {"kind": "dspark", "markov": "gated"}, {"kind": "dspark", "confidence": True}],
)
def test_a_drafter_that_has_no_gguf_yet_is_refused_before_it_is_trained(drafter: dict[str, Any]) -> None:
    config = {"target": {"model": "-"}, "drafter": drafter, "training": {"loss": "dspark"}}
    with pytest.raises(ValueError, match=r"export\.layouts: gguf is not written with drafter\.sliding_window"):
        RunConfig.model_validate(config | {"export": {"layouts": ["dflash", "gguf"]}})
