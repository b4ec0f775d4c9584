"""Where the drafter's layers start from: at random, or as copies of the target's last layers."""

import torch
from torch import nn

from dflash.config import DrafterConfig
from dflash.drafter import Drafter, DrafterShape
from dflash.errors import ConfigMismatch
from dflash.target import Target, decoder_layers

_STD = 0.02  # the initializer range of the Qwen3 family


def new_drafter(shape: DrafterShape, config: DrafterConfig, target: Target, seed: int) -> Drafter:
    """A drafter in float32 on the CPU, the same for the same seed."""
    drafter = Drafter(shape).float()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=_STD, generator=generator)
    if config.init == "target":
        _copy_target(drafter, target)
    return drafter


@torch.no_grad()
def _copy_target(drafter: Drafter, target: Target) -> None:
    """Layers from the target's last ones, `fc` the identity on the last tap, norms alike.

    The last tap is then what the first copied layer read in the target, up to the QK-norm that the target may lack.
    """
    hidden = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    sources = decoder_layers(target.model)[-drafter.shape.num_layers :]
    for layer, source in zip(drafter.layers, sources, strict=True):
        theirs = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            if name in theirs:
                if theirs[name].shape != parameter.shape:
                    raise ConfigMismatch(
                        f"drafter.init=target: the target's {name} has shape {tuple(theirs[name].shape)}, the drafter's "
                        f"{tuple(parameter.shape)}. Use drafter.init=random for this target."
                    )
                parameter.copy_(theirs[name])
            elif not name.endswith(("q_norm.weight", "k_norm.weight")):
                raise ConfigMismatch(
                    f"drafter.init=target: the target's layers have no {name}. Use drafter.init=random for this target."
                )
    drafter.hidden_norm.weight.copy_(sources[0].get_parameter("input_layernorm.weight"))
    drafter.norm.weight.copy_(target.model.get_decoder().get_parameter("norm.weight"))
