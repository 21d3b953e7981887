"""Layers with compressed or retrieved memories, written from their equations: one query at a time, in float64.

Shapes: B batch, H heads (and as many key/value heads), T tokens, S slots, D head size. x [B, T, dim] is what a layer's
queries and keys are made of, m its mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from support.position_oracles import rotated, scores, values


def split(x: Tensor, linear, heads: int) -> Tensor:
    """[B, T, dim] → [B, H, T, D]"""
    return (x @ linear.weight.T).view(*x.shape[:2], heads, -1).transpose(1, 2)


def content(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])


def weights(place, position: str, q: Tensor, at: Tensor, k: Tensor, k_at: Tensor, bias: Tensor) -> Tensor:
    """[B, H, T, S] attention of queries at positions at [T] to keys at k_at [S]; bias [… , T, S]: log of what
    multiplies."""
    d = at[:, None] - k_at
    if position.startswith("rotary"):
        s = content(rotated(q, position, at), rotated(k, position, k_at))
    else:
        s = scores(place, position, q, k, content, d, True)
    return (s + bias).softmax(-1)


def compress(c, old: Tensor) -> Tensor:
    """[B, block, dim] → [B, n, dim], token by token."""
    tokens, dim = old.shape[1:]
    if c.how == "dilated":
        for taps, step in zip(c.mixing, (1, c.ratio), strict=True):
            mixed = torch.zeros_like(old)
            for t in range(tokens):
                for n in range(3):
                    if 0 <= t + (n - 1) * step < tokens:
                        mixed[:, t] += old[:, t + (n - 1) * step] @ taps[n]
            old = old + mixed.clamp(min=0)
    found = []
    for first in range(0, tokens, c.ratio):
        some = old[:, first : first + c.ratio]
        if c.how == "mean":
            found.append(some.mean(1))
        elif c.how == "max":
            found.append(some.max(1).values)
        else:
            weight = c.weight.view(dim, c.ratio, dim)
            found.append(sum((some[:, n] @ weight[:, n].T for n in range(c.ratio)), c.bias))
    return torch.stack(found, 1)


def compressive(layer, p: SimpleNamespace, place, position: str, x: Tensor) -> Tensor:
    """Block after block, with slots whose values are constants."""
    m, (b, tokens, _), heads = layer.mechanism, x.shape, layer.heads
    q, k, v = (split(x, linear, heads) for linear in (layer.query, layer.key, layer.value))
    slots: list[tuple[Tensor, Tensor]] = []  # states [B, n, dim] and positions [B, n] of each compressed block
    usage, found = torch.zeros(b, tokens, dtype=torch.float64), []
    for first in range(0, tokens, p.block):
        at = torch.arange(first, min(first + p.block, tokens))
        begin = max(0, first - p.memory)
        seen, rows = slots[-(p.slots * p.ratio // p.block) :], []
        for row in range(b):  # positions of most-used slots differ
            keys_at = torch.cat([*(s[1][row] for s in seen), torch.arange(begin, int(at[-1]) + 1)])
            keys, vals = k[row : row + 1, :, begin : int(at[-1]) + 1], v[row : row + 1, :, begin : int(at[-1]) + 1]
            if seen:
                old = torch.cat([s[0][row : row + 1] for s in seen], 1).detach()
                keys, vals = (
                    torch.cat([split(old, linear, heads), t], 2)
                    for linear, t in ((layer.key, keys), (layer.value, vals))
                )
            d = at[:, None] - keys_at
            bias = torch.zeros(d.shape, dtype=torch.float64).masked_fill(d < 0, -math.inf)
            if m.span is not None:
                z = (m.span.ratio * m.span.max_span)[:, None, None]
                bias = bias + ((m.span.ramp + z - d) / m.span.ramp).clamp(0, 1).log()
            a = weights(place, position, q[row : row + 1, :, at], at, keys, keys_at, bias)
            rows.append(a @ vals + values(place, position, a, d, True))
            exact = a.detach()[0, :, :, a.shape[3] - (int(at[-1]) + 1 - begin) :]
            usage[row, begin:first] += exact.sum((0, 1))[: first - begin]
        found.append(torch.cat(rows))
        left = first - p.memory
        if len(at) == p.block and left >= 0:
            slots.append(_slots(m, p, x[:, left : left + p.block].detach(), usage[:, left : left + p.block], left))
    return torch.cat(found, 2)


def _slots(m, p: SimpleNamespace, old: Tensor, usage: Tensor, first: int) -> tuple[Tensor, Tensor]:
    n = p.block // p.ratio
    if p.compress == "most_used":
        pick = torch.stack([torch.tensor(sorted(row.argsort(descending=True)[:n].tolist())) for row in usage])
        return torch.stack([row[some] for row, some in zip(old, pick, strict=True)]), first + pick
    middle = torch.arange(n) * p.ratio + (p.ratio - 1) // 2
    return compress(m.compressor, old), (first + middle).expand(len(old), -1)


def memorizing(layer, p: SimpleNamespace, place, position: str, x: Tensor) -> Tensor:
    """Query by query: the own block and the ring, and the k best of the memory, whose keys and values are constants."""
    m, tokens, heads = layer.mechanism, x.shape[1], layer.heads
    q, k, v = (split(x, linear, heads) for linear in (layer.query, layer.key, layer.value))
    unit = getattr(m, "log_scale", None)
    if unit is not None:
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        q = q * unit.exp()[:, None, None] * math.sqrt(q.shape[3])
    far_q, far_k = q, k
    if not hasattr(m, "gate") and position.startswith("rotary"):
        far_q, far_k = (rotated(t, position) for t in (q, k))
    found = []
    for i in range(tokens):
        first = max(0, i // p.block * p.block - p.ring)
        at, near = torch.tensor([i]), torch.arange(first, i + 1)
        d = at[:, None] - near
        if position.startswith("rotary"):
            s = content(rotated(q[:, :, i : i + 1], position, at), rotated(k[:, :, near], position, near))
        else:
            s = scores(place, position, q[:, :, i : i + 1], k[:, :, near], content, d, True)
        a = s.softmax(-1)
        local, lse = a @ v[:, :, near] + values(place, position, a, d, True), s.logsumexp(-1, keepdim=True)
        begin = max(0, first - p.memory)
        if first > begin:
            t = content(far_q[:, :, i : i + 1], far_k[:, :, begin:first].detach())
            best = t.topk(min(p.k, first - begin), dim=-1)
            rows = (
                v[:, :, begin:first].detach().gather(2, best.indices[:, :, 0, :, None].expand(-1, -1, -1, v.shape[3]))
            )
            other = best.values.softmax(-1) @ rows
            gate = getattr(m, "gate", None)
            share = best.values.logsumexp(-1, keepdim=True) - lse if gate is None else gate[:, None, None]
            share = share.sigmoid()
            local = share * other + (1 - share) * local
        found.append(local)
    return torch.cat(found, 2)


MEMORIES: dict[str, Callable[..., Tensor]] = {
    "compressive": compressive,
    "memorizing": memorizing,
    "retrieval": memorizing,
}
"""by the kind's name: (layer, parameters, position encoding, its name, x) → [B, H, T, D]"""


def remembered(layer, spec, place, position: str, x: Tensor) -> Tensor:
    return MEMORIES[spec.kind](layer, spec.p, place, position, x)
