"""Linear attention by its definition: the recurrence, token after token, and every pair where weights depend on the
distance. Slow and obvious; the tests' oracle in float64.

    S_t = e^(decay_t) S_{t−1} + b_t v_tᵀ        z_t = e^(decay_t) z_{t−1} + b_t        numerator_t = a_t S_t
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.ops.linear.call import LinearCall, LinearState


def run_reference(call: LinearCall) -> tuple[Tensor, Tensor, LinearState | None]:
    a, b, v = (t.to(call.wide) for t in (call.a, call.b, call.v))
    if call.near is not None:
        return *finish(call, *_pairs(call, a, b, v)), None
    shared = a.shape[1] // b.shape[1]
    s, z = call.initial()
    numerators, denominators = [], []
    for t in range(v.shape[2]):
        if call.starts is not None:
            begins = call.starts[:, t, None, None]
            s, z = s.masked_fill(begins[..., None], 0), z.masked_fill(begins, 0)
        if call.decay is not None:
            factor = call.decay[:, :, t, None].to(call.wide).exp()
            s, z = s * factor[..., None], z * factor
        s = s + b[:, :, t, :, None] * v[:, :, t, None, :]
        z = z + b[:, :, t]
        query = a[:, :, t, :, None]
        numerators.append((query * s.repeat_interleave(shared, 1)).sum(2))
        denominators.append((query[..., 0] * z.repeat_interleave(shared, 1)).sum(2))
    numerator, denominator = torch.stack(numerators, 2), torch.stack(denominators, 2)
    return *finish(call, numerator, denominator), LinearState(s, z)


def _pairs(call: LinearCall, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    assert call.near is not None
    shared, tokens, queries = a.shape[1] // b.shape[1], v.shape[2], a.shape[2]
    s, z, b, v = (t.repeat_interleave(shared, 1) for t in (*call.initial(), b, v))
    at = torch.arange(tokens, device=v.device)
    distance = at[tokens - queries :, None] - at
    weight = far_weight(distance, call.near, call.ramp)  # [1 or B, H, Tq, T]
    alive = a.new_ones((a.shape[0], 1, queries, 1))
    if call.starts is not None:
        run = call.starts.cumsum(1)
        mine = run[:, None, tokens - queries :, None]
        weight = weight * (mine == run[:, None, None, :])
        alive = (mine == 0).to(a.dtype)
    pairs = (a @ b.transpose(2, 3)) * weight
    earlier = a * alive
    return pairs @ v + earlier @ s, pairs.sum(3) + (earlier * z[:, :, None]).sum(3)


def far_weight(distance: Tensor, near: Tensor, ramp: float) -> Tensor:
    """clip((d − near) / ramp, 0, 1) [1 or B, H, Tq, T] of near [1 or B, H, 1 or Tq]; 0 for the future. Its
    gradient lives strictly inside the ramp, as that of spans; torch.clamp has one at the ends too."""
    x = (distance - near[..., None]) / ramp
    return torch.where((x > 0) & (x < 1), x, x.detach().clamp(0, 1)) * (distance >= 0)


def finish(call: LinearCall, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, or the sums as they are, in the dtypes that a call returns."""
    if call.divide is None:
        return numerator.to(call.v.dtype), denominator
    by, eps = call.divide
    if by == "rms":
        return F.rms_norm(numerator, numerator.shape[3:], eps=eps).to(call.v.dtype), torch.zeros_like(denominator)
    nothing = denominator < eps if eps else denominator == 0
    safe = torch.where(nothing, eps if by == "clamped" else 1, denominator)
    if by == "clamped":
        return (numerator / safe[..., None]).to(call.v.dtype), safe.log()
    out = torch.where(nothing[..., None], 0, numerator / safe[..., None])
    return out.to(call.v.dtype), torch.where(nothing, -math.inf, safe.log())
