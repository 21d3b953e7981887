"""Decoding from rings in PyTorch, on any device: the same operation that the native kernel does in one call.

Shapes: B batch, Hkv key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.decode.codes import decode, encode, slot_first
from spanformer.ops.rule import Rule

if TYPE_CHECKING:
    from spanformer.ops.decode.rings import Rings


class BandedDecode:
    """One query per row over the slots that each head sees, head by head."""

    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        self.rings, self.rule, self.scale, self.limits = rings, rule, scale, rule.limits()

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        if new is not None:
            write_newest(self.rings, *new)
            if self.rings.recent is not None:
                write_newest(self.rings.recent.rings, *new)
        found = [self._head(q[:, head, 0], head) for head in range(q.shape[1])]
        outs, lses = zip(*found, strict=True)
        return Attended(torch.stack(outs, 1)[:, :, None], torch.stack(lses, 1)[:, :, None])

    def _head(self, q: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """q [B, D] → [B, Dv] and [B]"""
        rings, rule = self.rings, self.rule
        b, exact = len(q), torch.float64 if q.dtype == torch.float64 else torch.float32
        g, shift = head // (rule.heads // len(rings.capacities)), 1 if rule.paper_compat else 0
        capacity, first = rings.capacities[g], int(rings.first[g])
        seen = min(self.limits[head], capacity - shift, max(rings.newest.tolist(), default=-1) + 1 - shift)
        newest, d = rings.newest.to(q.device)[:, None], torch.arange(max(0, seen), device=q.device)
        position = newest - shift - d  # [B, seen]
        oldest = (
            rings.sink_tokens
            if rings.oldest is None
            else rings.oldest[:, g, None].clamp(min=rings.sink_tokens).to(q.device)
        )
        visible, soft = position >= oldest, torch.zeros((b, len(d)), dtype=exact, device=q.device)
        if rule.span is not None:
            z = rule.span[:, head] if rule.dynamic else rule.span[head].expand(b, 1)  # [B, 1]
            m = ((z.to(exact) - d + rule.ramp) / rule.ramp).clamp(0, 1)
            visible = visible & (m > 0)
            soft = torch.where(visible, m, 1).log()
        if rule.distance_bias is not None:
            soft = soft + rule.distance_bias[head, : len(d)].to(exact)
        early = torch.arange(rings.sink_tokens, device=q.device).expand(
            b, -1
        )  # sink tokens are visible at any distance
        slot = first + torch.cat([position % capacity, early - rings.sink_tokens], 1)  # [B, seen + sinks]
        visible = torch.cat([visible, early <= newest - shift], 1)
        soft = torch.cat([soft, soft.new_zeros(early.shape)], 1)
        keys, values = (rows_at(rings, kind, slot, exact) for kind in (0, 1))
        if rings.recent is not None and d.numel():
            keys, values = (self._recent(kind, t, position, g) for kind, t in enumerate((keys, values)))
        score = self._by_distance((keys @ q.to(exact)[..., None])[..., 0] * self.scale, q.to(exact), head, len(d))
        score = torch.where(visible, score + soft, -math.inf)
        if rule.sink_logits is not None:
            score = torch.cat([score, rule.sink_logits[head].to(exact).expand(b, 1)], 1)
        lse = score.logsumexp(1) if score.shape[1] else score.new_full((b,), -math.inf)
        lse = lse.masked_fill(lse == math.inf, math.nan)  # as inf − inf is, in a softmax
        weight = torch.where(lse[:, None] == -math.inf, 0, (score - lse[:, None]).exp())[:, : slot.shape[1]]
        values = torch.where(visible[..., None], values, 0)  # an unwritten slot may hold anything
        out = (weight[:, None] @ values)[:, 0]
        if rule.distance_value is not None:
            table = rule.distance_value[head % rule.distance_value.shape[0]].to(exact)
            out = out + weight[:, : len(d)] @ table[d.clamp(max=len(table) - 1)]
        return out.to(q.dtype), lse

    def _recent(self, kind: int, rows: Tensor, position: Tensor, g: int) -> Tensor:
        """rows [B, seen + sinks, ·], the newest of them in 8 bits."""
        assert self.rings.recent is not None
        held, first = self.rings.recent.rings, self.rings.recent.first(self.rings.newest).to(rows.device)
        near = rows_at(held, kind, int(held.first[g]) + position % held.capacities[g], rows.dtype)
        near = torch.where((position >= first[:, None])[..., None], near, rows[:, : position.shape[1]])
        return torch.cat([near, rows[:, position.shape[1] :]], 1)

    def _by_distance(self, products: Tensor, q: Tensor, head: int, seen: int) -> Tensor:
        """The products [B, seen + sinks] plus q·r[d], with distance_scale applied."""
        rule = self.rule
        near, early = products[:, :seen], products[:, seen:]
        if rule.distance_vec is not None:
            table = rule.distance_vec[head % rule.distance_vec.shape[0], :seen]
            near = near + self.scale * (q @ table.to(q.dtype).T)
        if rule.distance_scale is not None:
            near = near.relu() * rule.distance_scale[head, :seen].to(q.dtype)
        return torch.cat([near, early], 1)


def rows_at(rings: Rings, kind: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys (kind 0) or values (1) in slots [B, n], dequantised: [B, n, D or Dv]."""
    stored = (rings.keys, rings.values)[kind]
    rows = stored.gather(1, slots[..., None].expand(-1, -1, stored.shape[2]))
    if rings.scales is None:
        return rows.to(dtype)
    held = slot_first(rings.scales[kind])
    at = slots if held.ndim == 2 else slots[..., None].expand(-1, -1, held.shape[2])
    return decode(rows, held.gather(1, at), rings.sizes[kind], kind, dtype)


def write_newest(rings: Rings, k: Tensor, v: Tensor) -> None:
    """Write k [B, Hkv, 1, D] and v [B, Hkv, 1, Dv] to the slots of each row's newest position; rows at −1 stay
    empty."""
    assert isinstance(rings.capacity, Tensor)  # __post_init__ converted it
    row = (rings.newest >= 0).nonzero()[:, 0]
    position = rings.newest[row, None]  # [rows, 1]
    slot = rings.first + torch.where(
        position < rings.sink_tokens, position - rings.sink_tokens, position % rings.capacity
    )
    row, slot = row.to(k.device), slot.to(k.device)
    for kind, (held, new) in enumerate(((rings.keys, k), (rings.values, v))):
        new = new[row, :, 0]
        if rings.scales is not None and rings.bits:
            new, scales = encode(new, rings.bits, kind)
            slot_first(rings.scales[kind])[row[:, None], slot] = scales
        held[row[:, None], slot] = new
