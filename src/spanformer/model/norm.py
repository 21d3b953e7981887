"""Layer normalisation, and Root Mean Square Layer Normalization (Zhang, Sennrich, 2019).
https://arxiv.org/abs/1910.07467

    layer:  y = w · (x − mean(x)) / sqrt(var(x) + ε) + b            rms:  y = w · x / sqrt(mean(x²) + ε)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


def make_norm(kind: Literal["layer", "rms"], dim: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(dim)
    if kind == "rms":
        return RMSNorm(dim)
    raise ValueError(f"norm is {kind!r}; expected layer or rms")


class RMSNorm(nn.Module):
    """Like nn.RMSNorm, in about half its time on a CPU, forward and backward, but without a second derivative."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim], normalised in float32 or wider, returned in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # where nothing is differentiated, calling the function directly takes a third of the time of few rows
        normalise = _Normalise.apply if torch.is_grad_enabled() else _normalise
        return normalise(x.to(wide), self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}"


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * _scale(x, eps) * weight


def _scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class _Normalise(torch.autograd.Function):
    """n = x · s, s = 1 / sqrt(mean(x²) + ε), y = n · w;   ∂w = Σ g·n,   ∂x = s · (g·w − n · mean(g·w·n))."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        normal = x * scale
        ctx.save_for_backward(normal, weight, scale)
        return normal * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, weight, scale = ctx.saved_tensors
        product = grad * normal
        mean = (product @ weight)[..., None] / weight.numel()
        grad_x = torch.addcmul(grad * weight, normal, mean, value=-1) * scale
        return grad_x, product.reshape(-1, weight.numel()).sum(0), None
