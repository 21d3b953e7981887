"""Routing as the paper has it, for encoders: each cluster takes its w nearest queries and its w nearest keys.

    out_i = mean over the clusters c that took i of Σ_j softmax_j(q_i·k_j / √D) v_j,   j among the w keys of c

A token that no cluster took gives zeros; one that several took gives their mean. Which tokens a cluster takes depends
on the whole text, so this is not causal. Shapes: B batch, H heads, T tokens, C clusters, w tokens of a cluster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spanformer.ops import Attended, Rule, attend
from spanformer.ops.buckets import Seen, pick_rows


def attend_top(q: Tensor, k: Tensor, v: Tensor, near_q: Tensor, near_k: Tensor, window: int, seen: Seen) -> Attended:
    """q, k, v [B, H, T, D]; near_q, near_k [B, H, T, C], −inf: never taken. lse: of the mean of the clusters' sums."""
    (b, h, t, _), c = q.shape, near_q.shape[3]
    w = min(window, t)
    (_, at_q), (best, at_k) = (near.flatten(0, 1).transpose(1, 2).topk(w, 2) for near in (near_q, near_k))
    at_q = at_q.sort(2).values  # by position, so that rows are read in order
    bias = torch.zeros_like(best).masked_fill(best == -math.inf, -math.inf)
    queries = pick_rows(q.flatten(0, 1), at_q.flatten(1)).view(b * h * c, 1, w, -1)
    keys, values = (pick_rows(x.flatten(0, 1), at_k.flatten(1)).view(b * h * c, 1, w, -1) for x in (k, v))
    rule = Rule(1, causal=False, key_bias=bias.view(b * h * c, 1, w).to(torch.float32))
    found = attend(
        queries, keys, values, rule, scale=seen.scale, dropout=seen.dropout, backend=seen.backend
    )  # fmt: skip
    taken = near_q.flatten(0, 1).transpose(1, 2).gather(2, at_q) > -math.inf  # [N, C, w]; padding is not
    rows = (at_q + torch.arange(b * h, device=q.device)[:, None, None] * t).flatten()
    weight = taken.flatten().to(q.dtype)
    many = q.new_zeros(b * h * t).index_add(0, rows, weight)
    out = v.new_zeros(b * h * t, v.shape[3]).index_add(0, rows, found.out.flatten(0, 2) * weight[:, None])
    lse = found.lse.flatten()
    peak = lse.detach().amax()
    total = lse.new_zeros(b * h * t).index_add(0, rows, (lse - peak).exp() * weight.to(lse.dtype))
    often = many.clamp(min=1)
    alone = total == 0
    lse = torch.where(alone, -math.inf, (torch.where(alone, 1, total) / often).log() + peak)
    return Attended((out / often[:, None]).view(b, h, t, -1), lse.view(b, h, t))
