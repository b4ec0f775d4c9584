"""What config.json says of windows and of the parts that look back, in the words of the published checkpoints."""

from typing import Any

from dflash.errors import ConfigMismatch
from dflash.model.convolution import GROUP, TAPS
from dflash.model.shape import DrafterKind, DrafterShape

Json = dict[str, Any]

ARCHITECTURES: dict[DrafterKind, str] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
}


def part_fields(shape: DrafterShape) -> Json:
    """The keys of a kind's parts."""
    if shape.kind == "dflash2":
        return {
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
            "selector_rank": shape.rank,
            "selector_top_k": shape.candidates,
        }
    if shape.kind == "dspark":
        return {
            "markov_rank": shape.rank,
            "markov_head_type": shape.markov,
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence,
            "sample_from_anchor": False,  # slot 0 drafts nothing, as in DFlash; DSpark's own code lets it draft
        }
    return {}


def read_parts(value: Json) -> Json:
    """Fields of a DrafterShape, from a whole config.json. Raises ConfigMismatch for parts of another form."""
    places = (value, value.get("dflash_config", {}))

    def read(key: str) -> Any:
        found = [place[key] for place in places if key in place]
        if not found:
            raise ConfigMismatch(f"config.json has no {key}, neither at the top nor in dflash_config.")
        return found[0]

    kind = value.get("speculators_model_type")
    if kind is None:
        names = {name: kind for kind, name in ARCHITECTURES.items()}
        kind = names.get((value.get("architectures") or ["none"])[0])
    if kind is None and "architectures" not in value:
        raise ConfigMismatch("config.json has no architectures, which name the kind of drafter.")
    if kind not in ARCHITECTURES:
        raise ConfigMismatch(
            f"config.json is of {kind or value.get('architectures')}; expected {', '.join(ARCHITECTURES)} or one of "
            f"{', '.join(ARCHITECTURES.values())}."
        )
    if kind == "dflash2":
        slots, channels = read("conv_kernel_size"), read("conv_group_size")
        if (slots, channels) != (TAPS, GROUP):
            raise ConfigMismatch(
                f"config.json: convolutions of {slots} slots and groups of {channels} channels; expected {TAPS} and "
                f"{GROUP}."
            )
        return {"kind": kind, "rank": read("selector_rank"), "candidates": read("selector_top_k"), "tables": "free"}
    if kind == "dspark":
        if read("sample_from_anchor"):
            raise ConfigMismatch("config.json: sample_from_anchor is true, expected false: here slot 0 drafts nothing.")
        form = read("markov_head_type")
        if form not in ("vanilla", "gated"):
            raise ConfigMismatch(f"config.json: markov_head_type is {form!r}, expected vanilla or gated.")
        confidence = bool(read("enable_confidence_head"))
        if confidence and not read("confidence_head_with_markov"):
            raise ConfigMismatch("config.json: confidence_head_with_markov is false, expected true.")
        parts = {"kind": kind, "rank": read("markov_rank"), "markov": form, "confidence": confidence}
        return parts | {"tables": "free"}
    return {}


def sliding_fields(shape: DrafterShape) -> Json:
    """The keys of the layers' windows."""
    types = ["full_attention"] * shape.num_layers
    for layer in shape.sliding_layers:
        types[layer] = "sliding_attention"
    return {
        "layer_types": types,
        "use_sliding_window": bool(shape.sliding_layers),
        "sliding_window": shape.sliding_window,
    }


def read_sliding(layers: Json) -> Json:
    """Fields of a DrafterShape, from the keys of the layers."""
    types = layers.get("layer_types") or []
    sliding = tuple(number for number, kind in enumerate(types) if kind == "sliding_attention")
    if not sliding:
        return {}
    window = layers.get("sliding_window")
    if not isinstance(window, int):
        raise ConfigMismatch(
            f"config.json: layer_types has windows in {list(sliding)}, but sliding_window is {window!r}."
        )
    return {"sliding_window": window, "sliding_layers": sliding}
