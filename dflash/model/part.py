"""What every part has that a drafter may have beyond plain DFlash."""

import torch
from torch import nn

CONVOLUTIONS = ("attention_conv", "mlp_conv")  # names of a layer's parts


class Part(nn.Module):
    """A part that changes nothing as it starts: with it, the drafter is plain DFlash bit for bit."""

    def start(self, generator: torch.Generator) -> None:
        """Set the parameters: random ones drawn from `generator`, zero where the part meets the drafter."""
        raise NotImplementedError
