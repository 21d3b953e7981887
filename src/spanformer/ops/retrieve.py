"""Attention over the k best rows of a store, found by an exact search and read without a gradient into the store.

    P_i = the k rows with the largest q_i·k_n        out_i = Σ_{n ∈ P_i} exp(s_in − lse_i) v_n        s_in = c·q_i·k_n

8-bit codes of the keys propose candidates, the keys themselves decide. A query whose k-th score is not above all that
the codes may have hidden (`Found.bound`) is searched again in float32, so what is found is exact.
Only ids and weights are kept for the backward pass: rows are gathered again, some queries at a time.

Shapes: M stores, N rows, Q queries of each, k rows of a query, D and Dv numbers of a key and of a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.search import Codes, top_k

CANDIDATES = 2
"""rows that codes propose for each one that is wanted"""
ROOM = 1 << 22
"""numbers that are gathered at a time"""


class Retrieved(NamedTuple):
    out: Tensor
    """[M, Q, Dv]"""
    lse: Tensor
    """[M, Q]; −∞ where nothing was found"""
    lowest: Tensor
    """[M, Q] the smallest score s among the rows that were read; every other row has one at most as large"""


def find_rows(codes: Codes, keys: Tensor, queries: Tensor, k: int) -> Tensor:
    """[M, Q, min(k, N)] ids of the rows of keys [M, N, D] with the largest products with queries [M, Q, D], in no
    order; −1 where there are fewer. codes: of the same keys; a row whose scale is NaN is not found."""
    k, count = min(k, codes.count), codes.count
    fetch = min(CANDIDATES * k, count)
    found = top_k(codes, queries, fetch)
    if fetch == k:
        return found.ids
    scores = _products(keys, queries.detach(), found.ids)
    best = scores.topk(k, dim=2)
    ids = found.ids.gather(2, best.indices)
    hidden = found.scores[..., -1] + found.bound.to(found.scores.dtype)
    unsure = (found.ids[..., -1] >= 0) & (best.values[..., -1] < hidden)
    for m in unsure.any(1).nonzero()[:, 0].tolist():
        some = unsure[m]
        seen = codes.scales[m, :count] if codes.scales is not None else None
        ids[m, some] = _scan(keys[m, :count], queries[m, some].detach(), k, seen)
    return ids


def _scan(keys: Tensor, queries: Tensor, k: int, scales: Tensor | None) -> Tensor:
    """[Q, k] the same of one store, by products of keys [N, D] with queries [Q, D], some of these at a time."""
    found, step = [], max(1, ROOM // max(1, keys.shape[0]))
    for some in queries.split(step):
        scores = some @ keys.mT
        if scales is not None:
            scores = scores.masked_fill(~scales.isfinite(), -math.inf)
        best = scores.topk(k, dim=1)
        found.append(torch.where(best.values == -math.inf, -1, best.indices))
    return torch.cat(found)


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float) -> Retrieved:
    """Of queries q [M, Q, D] over the rows ids [M, Q, k] of keys [M, N, D] and values [M, N, Dv]. Only q gets a
    gradient."""
    return Retrieved(*_AttendRows.apply(q, keys.detach(), values.detach(), ids, scale))


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float):  # pyright: ignore
        out, lse, lowest, weights = [], [], [], []
        for some in _chunks(ids, keys.shape[2]):
            there = ids[:, some] >= 0
            scores = scale * _products(keys, q[:, some], ids[:, some])
            lse.append(scores.logsumexp(2))
            a = torch.where(there, (scores - torch.where(lse[-1] == -math.inf, 0, lse[-1])[..., None]).exp(), 0)
            lowest.append(torch.where(there, scores, math.inf).amin(2))
            out.append((a[:, :, None] @ _rows(values, ids[:, some]))[:, :, 0])
            weights.append(a)
        found = tuple(torch.cat(each, 1) for each in (out, lse, lowest))
        ctx.save_for_backward(keys, values, ids, torch.cat(weights, 1), found[0])
        ctx.scale = scale
        ctx.mark_non_differentiable(found[2])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx, g_out, g_lse, _g_lowest):  # pyright: ignore
        keys, values, ids, weights, out = ctx.saved_tensors
        found = []
        for some in _chunks(ids, keys.shape[2]):
            a = weights[:, some]
            slope = torch.zeros_like(a)
            if g_out is not None:
                g = g_out[:, some]
                slope = (_rows(values, ids[:, some]) @ g[..., None])[..., 0] - (g * out[:, some]).sum(2, keepdim=True)
            if g_lse is not None:
                slope = slope + g_lse[:, some, None]
            found.append(((a * slope)[:, :, None] @ _rows(keys, ids[:, some]))[:, :, 0] * ctx.scale)
        return torch.cat(found, 1), None, None, None, None


def _chunks(ids: Tensor, d: int) -> list[slice]:
    step = max(1, ROOM // max(1, ids.shape[0] * ids.shape[2] * d))
    return [slice(n, n + step) for n in range(0, ids.shape[1], step)]


def _rows(t: Tensor, ids: Tensor) -> Tensor:
    """[M, Q, k, D] rows of t [M, N, D]"""
    m, n, d = t.shape
    first = torch.arange(m, device=t.device)[:, None, None] * n
    return t.reshape(m * n, d).index_select(0, (ids.clamp(min=0) + first).flatten()).view(*ids.shape, d)


def _products(keys: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """[M, Q, k] products with rows; −∞ where an id is −1."""
    found = []
    for some in _chunks(ids, keys.shape[2]):
        found.append((_rows(keys, ids[:, some]) @ q[:, some, :, None])[..., 0].masked_fill(ids[:, some] < 0, -math.inf))
    return torch.cat(found, 1)
