"""Linformer and low-rank attention from their equations, one sum at a time in float64.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POOLED = ("linformer", "low_rank", "sinkhorn")
"""kinds whose keys are made of several tokens"""


def pooled(m, scoring: str, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
    """[B, H, T, D], the output of mechanism m; q, k and v [B, H, T, D] with their positions."""
    if padding is None:
        padding = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool)
    rows = [one(m, scoring, q[b], k[b], v[b], padding[b].tolist()) for b in range(len(q))]
    return torch.stack(rows)


def one(m, scoring: str, q: Tensor, k: Tensor, v: Tensor, padding: list[bool]) -> Tensor:
    """Of one text, [H, T, D]."""
    if scoring == "low_rank":
        return low_rank(m, q, k, v, padding)
    if scoring == "sinkhorn":
        return torch.stack([sinkhorn(m, q[h], k[h], v[h], padding) for h in range(len(q))])
    if m.pooling is None:
        keys, values = (summed(m, x, which, padding) for which, x in (("e", k), ("f", v)))
        return (q @ keys.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1) @ values
    tokens = [[t for t in block if not padding[t]] for block in torch.arange(q.shape[1]).split(m.pooling.size)]
    both = [(pool(m.pooling, k, 0, block), pool(m.pooling, v, 1, block)) for block in tokens if len(block)]
    keys, values = (torch.stack(each, 1) for each in zip(*both, strict=True))
    return (q @ keys.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1) @ values


def summed(m, x: Tensor, which: str, padding: list[bool]) -> Tensor:
    """[H, r, D]: Σ_t E[·, t] x_t · √(n / number of tokens)"""
    matrix = m.e if which == "e" or m.f is None else m.f
    real = [t for t, hidden in enumerate(padding) if not hidden]
    found = torch.stack([
        torch.stack([added([matrix[h % len(matrix), r, t] * x[h, t] for t in real]) for r in range(m.rank)])
        for h in range(len(x))
    ])  # fmt: skip
    return found * math.sqrt(m.length / len(real))


def pool(pooling, x: Tensor, which: int, block: list) -> Tensor:
    """[H, D] of the tokens of a block that are no padding."""
    at = [int(t) for t in block]
    if pooling.how == "mean":
        return added([x[:, t] for t in at]) / len(at)
    if pooling.how == "max":
        return torch.stack([x[:, t] for t in at]).amax(0)
    return added([pooling.weight[which, :, t % pooling.size, None] * x[:, t] for t in at])


def added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def low_rank(m, q: Tensor, k: Tensor, v: Tensor, padding: list[bool]) -> Tensor:
    size, rows = m.size, []
    for i in range(q.shape[1]):
        own = [j for j in range(i // size * size, i + 1) if not padding[j]]
        keys, values = [k[:, j] for j in own], [v[:, j] for j in own]
        for b in range(max(0, i // size - m.blocks), i // size):
            block = [t for t in range(b * size, (b + 1) * size) if not padding[t]]
            if block:
                keys.append(pool(m.pooling, k, 0, block))
                values.append(pool(m.pooling, v, 1, block))
        if not keys:
            rows.append(torch.zeros_like(q[:, i]))
            continue
        score = torch.stack([(q[:, i] * key).sum(-1) for key in keys], 1) / math.sqrt(q.shape[2])
        rows.append(torch.einsum("hj,hjd->hd", score.softmax(1), torch.stack(values, 1)))
    return torch.stack(rows, 1)


def sinkhorn(m, q: Tensor, k: Tensor, v: Tensor, padding: list[bool]) -> Tensor:
    """Of one head, [T, D]: one exponential, sum and quotient after the other."""
    size, tokens = m.size, range(len(q))
    blocks = [[t for t in tokens[first : first + size] if not padding[t]] for first in range(0, len(q), size)]
    count = len(blocks)

    def mean(x: Tensor, block: list[int]) -> Tensor:
        return added([x[t] for t in block]) / len(block)

    def may(i: int, j: int) -> bool:
        if not m.causal:
            return bool(blocks[j])
        return bool(blocks[j]) and j < i and j * size // m.stretch == i * size // m.stretch

    def ask(i: int) -> Tensor:
        if not m.causal:
            return mean(q, blocks[i]) if blocks[i] else torch.zeros_like(q[0])
        return torch.zeros_like(k[0]) if padding[i * size] else k[i * size]

    scale = math.sqrt(q.shape[1]) * m.temperature
    pairs = [(i, j) for i in range(count) for j in range(count) if may(i, j)]
    r = {(i, j): ((ask(i) * mean(k, blocks[j])).sum() / scale).exp() for i, j in pairs}
    for _ in range(m.iterations):
        r = {(i, j): r[i, j] / added([r[i, n] for n in range(count) if (i, n) in r]) for i, j in pairs}
        last = (lambda i: i + 1) if m.causal else (lambda i: count)
        r = {(i, j): r[i, j] / added([r[n, j] for n in range(last(i)) if (n, j) in r]) for i, j in pairs}
    rows = []
    for t in tokens:
        i = t // size
        keys = [(k[j], v[j]) for j in blocks[i] if j <= t or not m.causal]
        for place in range(size):
            those = [(r[i, j], j * size + place) for j in range(count) if (i, j) in r and j * size + place in blocks[j]]
            if those:
                mass = added([w for w, _ in those])
                keys.append(tuple(added([w * x[n] for w, n in those]) / mass for x in (k, v)))
        if not keys:
            rows.append(torch.zeros_like(v[0]))
            continue
        score = torch.stack([(q[t] * key).sum() for key, _ in keys]) / math.sqrt(q.shape[1])
        rows.append(score.softmax(0) @ torch.stack([value for _, value in keys]))
    return torch.stack(rows)
