"""A few keys with long spans (`Rule.key_span`) among many with short ones get a separate call.

A backend skips keys by tiles, and one key with a long span keeps its whole tile visible. So this pass takes such keys
out into a call at explicit positions; the other keys form a band as wide as their own spans. The results are
merged by lse.

Shapes: B batch, H heads, Tk keys, N keys with long spans.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops.lower.call import Call
from spanformer.ops.lower.sink_tokens import hide
from spanformer.ops.rule import KEY_TERMS

TILE = 64
WEIGHT = 3.0  # cost of a pair at explicit positions, relative to a pair in a band
WORTH = 0.6  # split only if that costs less than this share of the unsplit call
SHARES = (0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995)  # shares of the keys to try to leave in the band


def split_lasting(call: Call) -> tuple[Call, Call] | None:
    """(call over the keys of the band, call over keys with long spans), or None where a split would not help."""
    rule, e = call.rule, call.rule.key_span
    assert e is not None
    unfit = call.dropout or rule.blocks is not None or rule.distance_vec is not None or rule.distance_scale is not None
    if unfit or e.device.type != "cpu" or torch.compiler.is_compiling() or call.k.shape[2] < 4 * TILE:
        return None
    longest = e.detach().amax(1).float()  # [1 or B, Tk]
    edge = _edge(longest, rule.ramp, max(replace(rule, key_span=None).limits()))
    if edge is None:
        return None
    lasting = longest > edge
    count = int(lasting.sum(1).max())
    index = lasting.int().topk(count, 1).indices.sort(1).values  # [1 or B, N]
    q_positions, k_positions = call.positions()
    rows = max(len(index), len(k_positions))
    terms = {name: _take(t, index) for name in KEY_TERMS if (t := getattr(rule, name)) is not None}
    few = replace(
        call,
        k=_take(call.k.transpose(2, 3), index).transpose(2, 3),
        v=_take(call.v.transpose(2, 3), index).transpose(2, 3),
        rule=hide(replace(rule, sink_logits=None, documents=None, **terms), ~lasting.gather(1, index)),
        q_positions=q_positions,
        k_positions=k_positions.expand(rows, -1).gather(1, index.expand(rows, -1)),
        k_documents=None if call.k_documents is None else _take(call.k_documents, index),
    )
    band = replace(call, rule=hide(replace(rule, key_span=torch.where(lasting[:, None], 0, e)), lasting))
    return band, few


def _edge(longest: Tensor, ramp: float, limit: int) -> float | None:
    """The key span above which keys leave the band, by counting pairs; None: all stay. limit: the farthest distance
    that heads see whatever the keys' spans."""
    rows, keys = longest.shape
    after = keys - torch.arange(keys)  # about how many queries follow each key
    tiles = torch.nn.functional.pad(longest, (0, -keys % TILE)).unflatten(1, (-1, TILE)).amax(2)
    seen = torch.minimum(tiles + ramp, after[::TILE]).clamp(max=limit).sum(1) * TILE
    now = float(seen.mean())
    best, found = WORTH * now, None
    for edge in torch.quantile(longest[:, :: max(1, keys * rows // 100_000)], torch.tensor(SHARES)).tolist():
        count = int((longest > edge).sum(1).max())
        cost = keys * (edge + ramp) + WEIGHT * count * keys / 2
        if count and cost < best and math.isfinite(cost):
            best, found = cost, edge
    return found


def _take(t: Tensor, index: Tensor) -> Tensor:
    """[1 or B, …, Tk] at index [1 or B, N] → [1 or B, …, N]"""
    rows = max(len(t), len(index))
    at = index.view(len(index), *[1] * (t.ndim - 2), -1).expand(rows, *t.shape[1:-1], -1)
    return t.expand(rows, *t.shape[1:]).gather(-1, at)
