"""Attention by content, written from its equations: which pairs are in one bucket, and how far apart they are there.

Shapes: B batch, H heads, R rounds, T tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def by_content(m, kind: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """[B, H, T, D] of the mechanism m, from a layer's projections."""
    if kind == "lsh":
        return lsh(m, q, v)
    return routing(m, q, v) if causal else routing_top(m, q, k, v)


def lsh(m, q: Tensor, v: Tensor) -> Tensor:
    turned = torch.einsum("bhtd,hrdn->bhrtn", q.detach(), m.rotations.to(q.dtype))
    ids = torch.cat([turned, -turned], -1).argmax(-1)
    span = None if m.span is None else (m.span.ratio * m.span.max_span)[None, :, None, None]
    weight = union(ids, m.window, span, None if m.span is None else m.span.ramp)
    unit = q / q.norm(dim=-1, keepdim=True)
    weight = weight * (q @ unit.transpose(-1, -2)).exp()
    total = weight.sum(-1, keepdim=True)
    return torch.where(total == 0, v, weight @ v / torch.where(total == 0, 1, total))


def union(ids: Tensor, window: int, span: Tensor | None = None, ramp: float | None = None, itself: int = 0) -> Tensor:
    """[B, H, T, T]: the weight of each pair by the first of rounds [B, H, R, T] that shows it, 0 where none does."""
    t = ids.shape[3]
    before = torch.ones(t, t, dtype=torch.bool).tril(itself - 1)
    weight = torch.zeros(*ids.shape[:2], t, t, dtype=torch.float64)
    for each in ids.unbind(2):
        same = each[..., :, None] == each[..., None, :]
        rank = (same & torch.ones(t, t, dtype=torch.bool).tril(-1)).sum(-1)
        d = rank[..., :, None] - rank[..., None, :] - (1 - itself)
        mine = (same & before & (d < window)).double()
        if span is not None and ramp is not None:
            mine = mine * ((ramp + span - d) / ramp).clamp(0, 1)
        weight = torch.where(weight > 0, weight, mine)
    return weight


def norm(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def routing(m, q: Tensor, v: Tensor) -> Tensor:
    x = norm(q)
    ids = torch.einsum("bhtd,hcd->bhtc", x.detach(), m.centroids.to(q.dtype)).argmax(-1)
    weight = union(ids[:, :, None], m.window, itself=1) * (x @ x.transpose(-1, -2) / math.sqrt(q.shape[3])).exp()
    return weight @ v / weight.sum(-1, keepdim=True)


def routing_top(m, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each cluster takes its nearest queries and its nearest keys."""
    x, y = norm(q), norm(k)
    out, many = torch.zeros_like(v), torch.zeros(*v.shape[:3], 1, dtype=v.dtype)
    near = [torch.einsum("bhtd,hcd->bhct", t.detach(), m.centroids.to(q.dtype)) for t in (x, y)]
    w = min(m.window, q.shape[2])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for c in range(m.buckets):
                queries, keys = (each[b, h, c].argsort(descending=True)[:w] for each in near)
                a = (x[b, h, queries] @ y[b, h, keys].T / math.sqrt(q.shape[3])).softmax(-1)
                index = torch.zeros(q.shape[2], w, dtype=v.dtype)
                index[queries, torch.arange(w)] = 1
                place = torch.zeros(*v.shape[:2], 1, 1, dtype=v.dtype)
                place[b, h] = 1
                out = out + place * (index @ (a @ v[b, h, keys]))
                many = many + place * index.sum(-1, keepdim=True)
    return out / many.clamp(min=1)
