"""Attention with a matrix state by its definition: the recurrence, token after token. Slow and obvious; the tests'
oracle in float64.

    S ← e^(decay_t) S      u = v_t, or β_t (v_t − Sᵀ k_t) by the delta rule      S ← S + k_t uᵀ      out_t = Sᵀ q_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops.linear.matrix_call import MatrixCall


def run_reference(call: MatrixCall) -> tuple[Tensor, Tensor]:
    q, k, v = (t.to(call.wide) for t in (call.q, call.k, call.v))
    s, outs = call.initial(), []
    for t in range(v.shape[2]):
        if call.starts is not None:
            s = s.masked_fill(call.starts[:, t, None, None, None], 0)
        if call.decay is not None:
            factor = call.decay[:, :, t].exp()
            s = s * (factor[..., None] if factor.ndim == 3 else factor[..., None, None])
        key, u = k[:, :, t, :, None], v[:, :, t]
        if call.beta is not None:
            u = call.beta[:, :, t, None] * (u - (key * s).sum(2))
        s = s + key * u[:, :, None]
        outs.append((q[:, :, t, :, None] * s.repeat_interleave(call.shared, 1)).sum(2))
    return torch.stack(outs, 2).to(call.v.dtype), s
