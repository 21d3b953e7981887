"""Attention in chunks of tokens that are sorted by bucket, as Reformer has it (section 2).

    P_i^(r) = {j < i : h_r(q_j) = h_r(q_i), j in the chunk of i or the one before it}
    a_ij^(r) ∝ exp(s_ij − log N_ij)        N_ij: rounds in which the two meet

A later token takes a place in the sorted list and so moves chunk borders: this form is not causal. Plain PyTorch, for
comparison. Shapes: N rows, R rounds, T tokens, c chunk, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.ops import Attended, merge
from spanformer.ops.buckets import Placed, pick_rows, sort_tokens


def attend_chunks(placed: Placed, keys: Tensor, chunk: int) -> Attended:
    """[N, T, Dv] and [N, T], over chunks of this many tokens; a row that meets nobody gives zeros and −inf."""
    among = sort_tokens(placed.ids, placed.documents)
    chunks = among.inverse // chunk  # [N, R, T] of each token
    groups = among.groups.gather(2, among.inverse)
    parts = []
    for r in range(among.order.shape[1]):
        order, back = among.order[:, r], among.inverse[:, r]
        q, k, v = (_cut(pick_rows(t, order), chunk) for t in (placed.q, keys, placed.v))
        k, v = _two(k), _two(v)
        score = q @ k.transpose(-1, -2)  # [N, n, c, 2c]
        times = torch.zeros((), dtype=torch.int64, device=score.device)
        for each, group in zip(chunks.unbind(1), groups.unbind(1), strict=True):
            times = times + _meet(*(_cut(t.gather(1, order), chunk, -9) for t in (each, group)))
        at, group = _cut(order, chunk, -9), _cut(among.groups[:, r], chunk, -9)
        seen = (group[..., None] == _two(group, -9)[..., None, :]) & (at[..., None] > _two(at, -9)[..., None, :])
        seen = seen & (_two(at, -9)[..., None, :] >= 0)
        score = torch.where(seen, score - torch.where(seen, times, 1).log(), -math.inf)
        lse = score.logsumexp(-1)
        weight = (score - torch.where(lse == -math.inf, 0, lse)[..., None]).exp()
        out, tokens = (weight @ v).flatten(1, 2), placed.q.shape[1]
        parts.append(Attended(pick_rows(out[:, :tokens], back), lse.flatten(1, 2)[:, :tokens].gather(1, back)))
    return merge(parts)


def _cut(t: Tensor, chunk: int, fill: float = 0) -> Tensor:
    """[N, T, …] → [N, n, c, …], the last chunk filled up."""
    more = -t.shape[1] % chunk
    t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, more), value=fill)
    return t.view(t.shape[0], -1, chunk, *t.shape[2:])


def _two(t: Tensor, fill: float = 0) -> Tensor:
    """[N, n, c, …] → [N, n, 2c, …]: each chunk behind the one before it."""
    return torch.cat([F.pad(t, (0, 0) * (t.ndim - 2) + (1, 0), value=fill)[:, :-1], t], 2)


def _meet(chunks: Tensor, groups: Tensor) -> Tensor:
    """[N, n, c, 2c]: whether a pair is in one bucket and in one chunk or neighbouring ones."""
    apart = chunks[..., None] - _two(chunks, -9)[..., None, :]
    return ((groups[..., None] == _two(groups, -9)[..., None, :]) & (apart >= 0) & (apart <= 1)).long()
