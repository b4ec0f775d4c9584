"""The parts and windows of a drafter, from its parameters."""

from typing import Any

from dflash.config import DrafterConfig
from dflash.errors import ConfigMismatch
from dflash.model.convolution import GROUP


def drafter_parts(drafter: DrafterConfig, hidden_size: int) -> dict[str, Any]:
    """Fields of a `DrafterShape` that only some drafters have; what makes no difference to a shape is not in it.

    Raises ConfigMismatch for layers that the drafter lacks, or a width that convolutions cannot be cut into.
    """
    parts: dict[str, Any] = {}
    if drafter.kind != "dflash" and drafter.rank:
        parts |= {"rank": drafter.rank, "tables": drafter.tables}
    if drafter.kind == "dflash2" and hidden_size % GROUP:
        raise ConfigMismatch(
            f"drafter.kind=dflash2 shares kernels among {GROUP} neighbouring channels; the target's hidden size of "
            f"{hidden_size} is no multiple of that. Use drafter.kind=dspark."
        )
    if drafter.vocabulary is not None:
        parts["vocabulary"] = drafter.vocabulary
    if drafter.kind == "dspark":
        parts |= {"markov": drafter.markov, "confidence": drafter.confidence}
    if drafter.sliding_window is not None:
        layers = range(drafter.layers) if drafter.sliding_layers is None else drafter.sliding_layers
        parts |= {"sliding_window": drafter.sliding_window, "sliding_layers": tuple(sorted(set(layers)))}
        if outside := [layer for layer in layers if not 0 <= layer < drafter.layers]:
            raise ConfigMismatch(
                f"drafter.sliding_layers names layers {outside} of a drafter with {drafter.layers}; expected layers "
                f"within 0..{drafter.layers - 1}."
            )
    return parts
