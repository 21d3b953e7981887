"""Linear attention by its definition: the recurrence, token after token, and every pair where weights depend on the
distance. Slow and obvious; the tests' oracle in float64.

    S_t = e^(decay_t) S_{t−1} + b_t v_tᵀ        z_t = e^(decay_t) z_{t−1} + b_t        numerator_t = a_t S_t
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spanformer.ops.linear.call import LinearCall, LinearState


def run_reference(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    a, b, v = (t.to(call.wide) for t in (call.a, call.b, call.v))
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
    if call.near is not None:
        numerator, denominator = _pairs(call, a, b, v)
    return *finish(call, numerator, denominator), LinearState(s, z)


def _pairs(call: LinearCall, a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    assert call.near is not None
    shared, tokens = a.shape[1] // b.shape[1], v.shape[2]
    s, z, b, v = (t.repeat_interleave(shared, 1) for t in (*call.initial(), b, v))
    at = torch.arange(tokens, device=v.device)
    distance = at[:, None] - at
    weight = ((distance - call.near[..., None]) / call.ramp).clamp(0, 1) * (distance >= 0)  # [1 or B, H, T, T]
    alive = a.new_ones((a.shape[0], 1, tokens, 1))
    if call.starts is not None:
        run = call.starts.cumsum(1)
        weight = weight * (run[:, None, :, None] == run[:, None, None, :])
        alive = (run == 0)[:, None, :, None].to(a.dtype)
    pairs = (a @ b.transpose(2, 3)) * weight
    earlier = a * alive
    return pairs @ v + earlier @ s, pairs.sum(3) + (earlier * z[:, :, None]).sum(3)


def finish(call: LinearCall, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, or the sums as they are, in the dtypes that a call returns."""
    if not call.normalize:
        return numerator.to(call.v.dtype), denominator
    nothing = denominator == 0
    safe = torch.where(nothing, 1, denominator)
    out = torch.where(nothing[..., None], 0, numerator / safe[..., None])
    return out.to(call.v.dtype), torch.where(nothing, -math.inf, safe.log())
