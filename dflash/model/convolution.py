"""DFlash 2's convolutions over the slots of a block, before and after a sublayer, with kernels made from its input.

    y_t = Σ_o (b[0,o] + P[t,0,o]) · n_{t−o},   z = sublayer(y),   out_t = Σ_o (b[1,o] + P[t,1,o]) · z_{t−o}

n is the normed input, P = n·Qᵀ holds one number for 16 neighbouring channels; o = 0, 1; slots before slot 0 are 0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from dflash.model.part import Part
from dflash.model.shape import DrafterShape

TAPS = 2  # this slot and the one before it
GROUP = 16  # neighbouring channels that share what is made from the input
_SIDES = 2


class Convolution(Part):
    """One sublayer's pair of convolutions; zero `kernel_projection` and base (1, 0) leave the sublayer as it is."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.base_kernel = nn.Parameter(torch.zeros(_SIDES, TAPS, width))
        self.kernel_projection = nn.Linear(width, _SIDES * TAPS * (width // GROUP), bias=False)

    def start(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.base_kernel[:, 1])
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, normed: Float[Tensor, "*n K H"], sublayer: Callable[[Tensor], Tensor]) -> Float[Tensor, "*n K H"]:
        shape = (_SIDES, TAPS, normed.shape[-1] // GROUP)
        made = self.kernel_projection(normed).view(*normed.shape[:-1], *shape, 1)
        kernels = self.base_kernel.view(*shape, GROUP) + made
        before, after = kernels.unbind(-4)
        return _mixed(sublayer(_mixed(normed, before)), after)


def _mixed(slots: Float[Tensor, "*n K H"], kernels: Float[Tensor, "*n K T G 16"]) -> Float[Tensor, "*n K H"]:
    grouped = slots.reshape(*slots.shape[:-1], -1, GROUP)
    previous = F.pad(grouped, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    now, back = kernels.unbind(-3)
    mixed: Tensor = (grouped * now + previous * back).flatten(-2)
    return mixed
