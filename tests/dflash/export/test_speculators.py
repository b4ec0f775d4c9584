"""The library `speculators` reads what we export and gives our logits. Skipped where it is not in .bench/speculators.

pip install --no-deps --target .bench/speculators speculators==0.9.0 openai hs-connectors loguru pydantic-settings
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_toys import MASK, prompts, toy
from safetensors.torch import load_file

from dflash.export.export import target_facts, write_layout
from dflash.model.drafter import embed_blocks
from dflash.model.layouts import layout_config

BENCH = Path(__file__).parents[3] / ".bench"
LIBRARY = next((p for p in (BENCH / "speculators", BENCH) if (p / "speculators" / "__init__.py").is_file()), None)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"speculators is not installed in {BENCH}: make setup-bench")

# In a process of its own: what it imports must not be seen by the other tests.
THEIRS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.dflash import DFlashDraftModel, core

directory = sys.argv[2]
given = load_file(f"{directory}/given.safetensors")
anchors = given["anchors"]
# Its anchors are drawn at random: here they are ours.
core.select_anchors = lambda mask, count, size: (anchors, torch.ones_like(anchors, dtype=torch.bool))
convert_model(f"{directory}/dflash", f"{directory}/target", "dflash", f"{directory}/converted", validate_device="cpu")
out = {}
for name in ("speculators", "converted"):
    config = DFlashDraftModel.config_class.from_pretrained(f"{directory}/{name}")
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(f"{directory}/{name}", config=config).eval()
    assert type(model) is DFlashDraftModel
    assert model.config.speculators_config.proposal_methods[0].speculative_tokens == model.block_size - 1
    with torch.no_grad():
        ids = given["ids"]
        _, logits, *_ = model._backbone_forward(
            given["features"], ids, torch.ones_like(ids), given["features"][..., : model.hidden_size],
            torch.zeros_like(ids), max_anchors=anchors.numel(),
        )
    out[name] = logits.unflatten(1, (anchors.numel(), -1)).contiguous()
    out[f"{name}.embedding"] = model.embed_tokens.weight.contiguous()
    out[f"{name}.head"] = model.lm_head.weight.contiguous()
save_file(out, f"{directory}/out.safetensors")
"""


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500000.0,
        },
    ],
    ids=["default", "llama3"],
)  # fmt: skip
def test_its_converter_and_its_loader_give_our_logits(tmp_path: Path, rope: dict[str, Any] | None) -> None:
    from decoding_toys import llama
    from safetensors.torch import save_file

    one = toy(dtype=torch.float32, model=llama(**({"rope_parameters": rope} if rope else {})))
    one.target.model.save_pretrained(tmp_path / "target")
    facts = target_facts(str(tmp_path / "target"), one.target.model.config, "float32")
    for layout in ("dflash", "speculators"):
        (tmp_path / layout).mkdir()
        write_layout(tmp_path / layout, one.drafter, layout_config(layout, one.drafter.shape, facts))
    (ids,) = prompts(30)
    features = one.target.features(ids[None]).float()
    anchors = torch.tensor([3, 11, 24])
    save_file({"ids": ids[None], "features": features, "anchors": anchors}, tmp_path / "given.safetensors")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THEIRS, str(LIBRARY), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "out.safetensors")
    embedding, head = one.ends
    with torch.no_grad():
        embedded = embed_blocks(embedding, ids[None, anchors], 4, MASK)
        ours = head.logits(one.drafter(features, embedded, anchors[None]))[0]
    for name in ("speculators", "converted"):
        torch.testing.assert_close(theirs[name][0], ours, rtol=0, atol=2e-5)
        assert torch.equal(theirs[f"{name}.embedding"], embedding.weight)
        assert torch.equal(theirs[f"{name}.head"], head.weight)
    print(f"largest difference of logits: {float((theirs['speculators'][0] - ours).abs().max()):.1e}")
    converted = json.loads((tmp_path / "converted" / "config.json").read_text())
    written = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert {key: written.get(key) for key in converted if key not in _THEIR_OWN} == {
        key: value for key, value in converted.items() if key not in _THEIR_OWN
    }
    layers = converted["transformer_layer_config"]
    ignored = {"transformers_version", "pad_token_id"}
    assert {k: v for k, v in written["transformer_layer_config"].items() if k in layers} == {
        k: v for k, v in layers.items() if k not in ignored
    }


# Its converter writes sliding_window_non_causal: false, which vLLM 0.26 and 0.27 take for a causal block.
_THEIR_OWN = {
    "auto_map",
    "sliding_window_non_causal",
    "transformers_version",
    "speculators_version",
    "transformer_layer_config",
}
