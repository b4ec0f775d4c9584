"""Norm and SwiGLU that keep little for the backward pass under autocast; without autocast they are torch's own.

The norm computes in float32, gives the autocast dtype, so that all products share one cast, and keeps its input rounded
to that dtype. SwiGLU keeps gate and up, and makes silu(gate) again.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products on this device, or None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class LeanNorm(nn.RMSNorm):
    """RMSNorm that gives the autocast dtype; without autocast its weight's."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x.device)
        if dtype is None:
            return super().forward(x.to(self.weight.dtype))
        return cast("Tensor", _Norm.apply(x, self.weight, self.eps, dtype))  # type: ignore[no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)∘up."""
    if autocast_dtype(gate.device) is None:
        return F.silu(gate) * up
    return cast("Tensor", _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, dtype):  # type: ignore[no-untyped-def]
        exact = x.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x.to(dtype), scale, weight)
        ctx.dtype = x.dtype
        return (exact * scale * weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        x, scale, weight = ctx.saved_tensors
        normed, upstream = x.float() * scale, upstream.float()
        # y = w∘n, n = x·s:  ∂w = Σ ∂y∘n,  ∂x = s·(∂n − n·mean(∂n∘n)),  ∂n = w∘∂y
        down = upstream * weight
        grad = scale * (down - normed * (down * normed).mean(-1, keepdim=True))
        weight_grad = (upstream * normed).flatten(0, -2).sum(0)
        return grad.to(ctx.dtype), weight_grad.to(weight.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(upstream * up, gate), upstream * F.silu(gate)
