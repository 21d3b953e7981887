"""The layer at which each token should leave, known once its target is: the oracles that exit classifiers imitate.

Depth-Adaptive Transformer (Elbayad, Gu, Grave, Auli, 2019), §3.2. https://arxiv.org/abs/1910.10073

    likelihood    argmax_n L~_t^n − λ n      L^n = log p_n(target)
    correctness   argmax_n C~_t^n − λ n      C^n = 1 if layer n's best token is the target, else 0
    x~_t = Σ_t' exp(−(t − t')² / σ) x_t'     smoothing over neighbours; σ = 0: none

λ is the price of a layer. Ties go to the lowest layer.

Shapes: L layers, B batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def oracle_exits(scores: Tensor, price: float, smoothing: float = 0.0) -> Tensor:
    """scores [L, B, T], L^n or C^n → [B, T] the layer of each token, counted from 0."""
    smooth = _smooth(scores, smoothing) if smoothing else scores
    layers = torch.arange(len(scores), device=scores.device, dtype=scores.dtype)
    return (smooth - price * layers[:, None, None]).argmax(0)  # argmax takes the first of equal ones


def _smooth(scores: Tensor, sigma: float) -> Tensor:
    """Weights below 1e-4 are left out, so that no [T, T] matrix is needed."""
    radius = min(scores.shape[2] - 1, int((sigma * 9.2) ** 0.5))
    at = torch.arange(-radius, radius + 1, device=scores.device, dtype=scores.dtype)
    weight = torch.exp(-(at**2) / sigma)
    return torch.nn.functional.conv1d(scores.flatten(0, 1)[:, None], weight[None, None], padding=radius).view_as(scores)
