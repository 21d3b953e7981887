"""Merge attention over disjoint sets of keys: memories, retrieved and persistent keys have no distance, so `attend`
runs on them separately and this joins the results by lse.

    out = Σ_p exp(lse_p − lse) · out_p        lse = log Σ_p exp(lse_p)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spanformer.ops.attended import Attended


def merge(parts: Sequence[Attended]) -> Attended:
    """Attention over the keys of all parts together. out [B, H, Tq, Dv], lse [B, H, Tq] as in each part."""
    if not parts:
        raise ValueError("merge was given no parts; expected at least one Attended")
    for n, p in enumerate(parts):
        if p.out.shape != parts[0].out.shape or p.lse.shape != p.out.shape[:-1]:
            raise ValueError(
                f"parts[{n}] has out {list(p.out.shape)} and lse {list(p.lse.shape)}; "
                f"expected {list(parts[0].out.shape)} and {list(parts[0].out.shape[:-1])}, as in parts[0].out"
            )
    lse = torch.stack([p.lse for p in parts])  # [P, B, H, Tq]
    peak = lse.detach().amax(0)
    peak = torch.where(peak == -math.inf, 0, peak)  # a row that sees no key in any part
    weight = (lse - peak).exp()
    total = weight.sum(0)
    nothing = total == 0
    safe = torch.where(nothing, 1, total)
    share = (weight / safe)[..., None].to(parts[0].out.dtype)
    out = share[0] * parts[0].out
    for s, p in zip(share[1:], parts[1:], strict=True):
        out = torch.addcmul(out, s, p.out)  # one pass over memory, where a product and a sum are two
    return Attended(out, torch.where(nothing, -math.inf, safe.log() + peak))
