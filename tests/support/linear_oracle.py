"""Attention with a recurrent state, written from its equations as a weight for every pair, in float64.

Shapes: B batch, H heads (and as many key/value heads), T tokens, D head size. x [B, T, dim] is what a layer's queries
and keys are made of, m its mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Callable[[Tensor, Tensor], Tensor]


def _between(gates: Tensor) -> Tensor:
    """gates [B, H, T], log → [B, H, T, T]: the sum of those behind j up to i; 0 ahead."""
    tokens = range(gates.shape[2])
    rows = [[gates[..., j + 1 : i + 1].sum(-1) for j in tokens] for i in tokens]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _products(feature: Callable[[Tensor], Tensor]) -> Weights:
    return lambda q, k: feature(q) @ feature(k).transpose(-1, -2)


def linear(m, x: Tensor) -> Weights:
    return _products(lambda t: torch.where(t > 0, t + 1, t.exp()))


def performer(m, x: Tensor) -> Weights:
    def feature(t: Tensor) -> Tensor:
        t = t / t.shape[-1] ** 0.25
        inner = t @ m.omega.T.to(t.dtype)
        if m.relu:
            return (inner.clamp(min=0) + 1e-3) / len(m.omega) ** 0.5
        return (inner - (t * t).sum(-1, keepdim=True) / 2).exp() / len(m.omega) ** 0.5

    return _products(feature)


def rfa(m, x: Tensor) -> Weights:
    def feature(t: Tensor) -> Tensor:
        t = t / ((t * t).sum(-1, keepdim=True).sqrt() + 1e-3)
        angle = torch.einsum("bhtd,hd,nd->bhtn", t, m.sigma, m.frequency.to(t.dtype))
        return torch.cat([angle.sin(), angle.cos()], -1) / len(m.frequency) ** 0.5

    return _products(feature)


def gated_rfa(m, x: Tensor) -> Weights:
    gate = (x @ m.weight.T + m.bias).sigmoid().transpose(1, 2)  # [B, H, T]
    plain = rfa(m, x)
    return lambda q, k: plain(q, k) * (1 - gate)[:, :, None] * _between(gate.log()).exp()


def retention(m, x: Tensor) -> Weights:
    at = torch.arange(x.shape[1], dtype=torch.float64)
    decay = 1 - 0.5 ** m.log_span.double()
    faded = (decay[:, None, None] ** (at[:, None] - at).clamp(min=0)).to(x.dtype)
    return lambda q, k: q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * faded


def span_linear(m, x: Tensor) -> Weights:
    at = torch.arange(x.shape[1], dtype=torch.float64)
    distance, border = at[:, None] - at, m.border
    if hasattr(border, "ratio"):
        z = border.ratio.repeat_interleave(m.heads // len(border.ratio))[:, None, None] * border.max_span
    else:
        z = border.max_span * (x @ border.weight.T + border.bias).sigmoid()
        z = z.transpose(1, 2).repeat_interleave(m.heads // len(border.bias), 1)[..., None]
    near = ((border.ramp + z - distance) / border.ramp).clamp(0, 1)
    far = linear(m, x)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        exact = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).exp()
        return near * exact + (1 - near) * far(q, k) * m.far_scale.exp()[:, None, None]

    return weights


WEIGHTS: dict[str, Callable[..., Weights]] = {
    "linear": linear,
    "performer": performer,
    "rfa": rfa,
    "gated_rfa": gated_rfa,
    "retention": retention,
    "span_linear": span_linear,
}
"""by the kind's name: (mechanism, x) → (q, k) → weights of all pairs; a layer hides those that it does not see"""


def output(kind: str, weights: Tensor, v: Tensor) -> Tensor:
    """weights [B, H, T, T], 0 where nothing is seen, and v [B, H, T, D] → [B, H, T, D]"""
    mixed = weights @ v
    if kind == "retention":
        return mixed / ((mixed * mixed).mean(-1, keepdim=True) + 1e-6).sqrt()
    total = weights.sum(-1, keepdim=True)
    if kind in ("rfa", "gated_rfa"):
        return mixed / torch.where(total > 1e-3, total, 1e-3)
    return mixed / torch.where(total == 0, 1, total)


def log_sum(kind: str, weights: Tensor) -> Tensor:
    total = weights.sum(-1)
    return F.threshold(total, 1e-3, 1e-3).log() if "rfa" in kind else total.log()
