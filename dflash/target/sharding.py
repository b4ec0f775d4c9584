"""A target that does not fit one device: its layers lie on several, one after another, balanced.

Transformers reads each weight onto its device; accelerate moves what travels between them.
"""

from collections.abc import Sequence

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import compute_module_sizes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash.config import TargetConfig
from dflash.errors import ConfigMismatch
from dflash.host import free_bytes

_STEPS = 64  # room is tried in so many parts of the target's size
_FOR_WORK = 8  # this part of a device's free memory is left to activations and features


def device_map(config: TargetConfig, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of each module. Raises ConfigMismatch when the target does not fit all of them together."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(
                config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
            ),
            trust_remote_code=config.trust_remote_code,
        )
    model.tie_weights()
    rooms = [free_bytes(device) * (_FOR_WORK - 1) // _FOR_WORK for device in devices]
    placed = balanced(model, rooms, getattr(torch, config.dtype))
    if placed is None:
        size = compute_module_sizes(model, dtype=getattr(torch, config.dtype))[""]
        there = ", ".join(f"{room / 1e9:.1f} GB on {device}" for device, room in zip(devices, rooms, strict=True))
        raise ConfigMismatch(
            f"target.model={config.model} needs {size / 1e9:.1f} GB and room for its largest layer; there are {there}. "
            "Join more devices with + in target.devices."
        )
    return {name: devices[index] for name, index in placed.items()}


def balanced(model: PreTrainedModel, rooms: Sequence[int], dtype: torch.dtype) -> dict[str, int] | None:
    """Module → number of its device, so that the fullest holds the least; None when they do not fit `rooms` bytes."""
    total = compute_module_sizes(model, dtype=dtype)[""]
    for parts in range(_STEPS // len(rooms), _STEPS + _STEPS // 2):
        most = total * parts // _STEPS
        placed = infer_auto_device_map(
            model,
            max_memory={index: min(room, most) for index, room in enumerate(rooms)},
            no_split_module_classes=sorted(model._no_split_modules or ()),
            dtype=dtype,
        )
        if all(isinstance(where, int) for where in placed.values()):
            return dict(placed)
        if most > max(rooms):
            break
    return None
