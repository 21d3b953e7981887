"""Contenders that decode from per-head ring buffers: each head stores only as many keys and values as it reaches.

Position p is in slot p % r of a ring of r slots.
Shapes: B batch, D head size, r a head's ring, G heads whose rings are equally long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench import profiles
from spanformer.bench.contenders import Contender, unusable_backend
from spanformer.bench.work import Inputs, Work
from spanformer.ops import Rings, attend_rings


def _torch_cannot(work: Work) -> str | None:
    return None if work.terms == "plain" else "supports plain spans only"


def ring(t: Tensor, reach: int) -> Tensor:
    """The last r = `reach` of t [B, L, D], each in its slot: [B, r, D]."""
    length = t.shape[1]
    kept = torch.empty_like(t[:, :reach])
    at = torch.arange(length - reach, length)
    kept[:, at % reach] = t[:, at]
    return kept


def _native_build(inputs: Inputs) -> Callable[[], Tensor]:
    rule, work = inputs.rule(), inputs.work
    k, v = (torch.cat([ring(t[:, h], r) for h, r in enumerate(work.reaches())], 1) for t in (inputs.k, inputs.v))
    newest = torch.full((work.batch,), work.length - 1)
    rings = Rings(k, v, torch.tensor(work.reaches()), newest)
    return lambda: attend_rings(inputs.q, rings, rule, backend="native").out


def _torch_build(inputs: Inputs) -> Callable[[], Tensor]:
    """In PyTorch: one SDPA call per group of heads whose rings have the same length."""
    work, ramp = inputs.work, profiles.RAMP
    groups: dict[int, list[int]] = {}
    for head, reach in enumerate(work.reaches()):
        groups.setdefault(reach, []).append(head)
    parts = []
    for reach, heads in groups.items():
        k, v = (torch.stack([ring(t[:, h], reach) for h in heads], 1) for t in (inputs.k, inputs.v))  # [B, G, r, D]
        m = ((ramp + inputs.span[heads][:, None] - torch.arange(reach)) / ramp).clamp(0, 1)
        parts.append((torch.tensor(heads), k, v, m.log().to(inputs.q.dtype), torch.arange(reach)))
    newest = work.length - 1

    def forward() -> Tensor:
        out = torch.empty_like(inputs.q)
        for heads, k, v, bias, slots in parts:
            mask = bias[:, (newest - slots) % len(slots)][:, None]  # the slot of distance d moves with each token
            out[:, heads] = F.scaled_dot_product_attention(inputs.q[:, heads], k, v, attn_mask=mask)
        return out

    return forward


RINGS_TORCH = Contender("rings-torch", "per-head rings, PyTorch", _torch_cannot, _torch_build, kinds=("decode",))
RINGS_NATIVE = Contender(
    "rings-native", "per-head rings, spanformer native", lambda _work: unusable_backend("native"), _native_build,
    kinds=("decode",),
)  # fmt: skip
