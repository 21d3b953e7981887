"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/): momentum with all singular values set to
about 1. For a matrix W [rows, columns] with gradient G, momentum μ, learning rate η and decay λ:

    B ← μB + (1 − μ)G              M = μB + (1 − μ)G
    X ← M / |M|, then five times   X ← 3.4445 X − 4.775 (XXᵀ)X + 2.0315 (XXᵀ)²X        (Newton and Schulz)
    W ← (1 − ηλ) W − 0.2 √max(rows, columns) η X

The factor 0.2 √max makes updates as large as AdamW's (Liu et al., 2025, https://arxiv.org/abs/2502.16982), so that one
learning rate serves both. `torch.optim.Muon` always iterates in bfloat16. On a processor without bfloat16 units that
takes more than ten times as long as forward and backward, so here the dtype depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spanformer.core.processor import best_dtype

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""of X, (XXᵀ)X and (XXᵀ)²X: they raise small singular values fastest and end with all between about 0.7 and 1.2"""
ITERATIONS = 5
SMALLEST = 1e-7
"""norm below which a matrix is not scaled up"""


class Muon(Optimizer):
    """For matrices only. `dtype`: of the iteration's products; None: the fastest on the parameters' device."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        matrices = [p for group in self.param_groups for p in group["params"]]
        if wrong := [tuple(p.shape) for p in matrices if p.ndim != 2]:
            raise ValueError(f"a parameter given to Muon has shape {wrong[0]}; expected a matrix")
        self.dtype = dtype or best_dtype(matrices[0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                average = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonalise(p.grad.lerp(average, momentum), self.dtype)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))
        return loss


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """The loss from an optimiser's closure, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Newton–Schulz iteration, computed and returned in `dtype`: the matrix with its singular values moved near 1."""
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    x = x.T if len(x) > x.shape[1] else x  # so that XXᵀ is the smaller product
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if len(matrix) > matrix.shape[1] else x
