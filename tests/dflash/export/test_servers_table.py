"""docs/export.md says field by field what is written; the config that is written says the same."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from decoding_toys import toy

from dflash.model.layouts import TargetFacts, layout_config

DOCS = Path(__file__).parents[3] / "docs" / "export.md"
ROW = re.compile(r"^\| `([\w.]+)` \| ([dsl, ]+) \| (.*?) \|", re.MULTILINE)


def documented() -> dict[str, dict[str, Any]]:
    """The value that the table gives each field, by layout; None: it says in words where the value comes from."""
    found: dict[str, dict[str, Any]] = {"dflash": {}, "speculators": {}}
    for field, places, written in ROW.findall(DOCS.read_text()):
        literal = re.fullmatch(r"`(.*)`", written)
        value = (json.loads(literal[1]),) if literal and _is_json(literal[1]) else None
        for place in places.split(", "):
            if place in "dl":
                found["dflash"][field] = value
            if place in "sl":
                found["speculators"]["transformer_layer_config." * (place == "l") + field] = value
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_every_field_is_in_the_table_with_its_value() -> None:
    shape = toy(dtype=torch.float32).drafter.shape
    facts = TargetFacts("some/target", ["LlamaForCausalLM"], 0, [2], "bfloat16")
    for layout, table in documented().items():
        config = layout_config(layout, shape, facts)  # type: ignore[arg-type]
        written = {}
        for field, value in config.items():
            if field in ("dflash_config", "transformer_layer_config", "speculators_config"):
                written |= {f"{field}.{key}": one for key, one in value.items()}
            else:
                written[field] = value
        table.pop("transformer_layer_config", None)  # its own line says that it holds the others
        assert table.keys() == written.keys()
        for field, value in table.items():
            assert value is None or value == (written[field],), field


def test_the_name_in_architectures_is_one_that_servers_map() -> None:
    """One entry, that their registries have; no code of a repository beside it."""
    shape = toy(dtype=torch.float32).drafter.shape
    facts = TargetFacts("some/target", [], 0, 2, "float32")
    for layout in ("dflash", "speculators"):
        config = layout_config(layout, shape, facts)  # type: ignore[arg-type]
        assert config["architectures"] == ["DFlashDraftModel"]
        assert "auto_map" not in config
    assert "maps that name to its\n`DFlashQwen3ForCausalLM`" in DOCS.read_text()
