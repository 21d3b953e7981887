"""Decoding from rings in PyTorch, on any device: the same operation that the native kernel does in one call.

Shapes: B batch, Hkv key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
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
    rows = stored.gather(1, slots[..., None].expand(-1, -1, stored.shape[2])).to(dtype)
    return rows if rings.scales is None else rows * rings.scales[kind].gather(1, slots)[..., None].to(dtype)


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
        if rings.scales is not None:
            new, rings.scales[kind][row[:, None], slot] = quantise(new)
        held[row[:, None], slot] = new


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D] to 8 bits: codes [..., D] int8 and one float32 scale [...] per row, the nearest multiples of
    max |x| / 127; the error is at most max |x| / 254 (and float32's rounding)."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    coded = scale >= torch.finfo(torch.float32).tiny  # False for NaN
    codes = torch.where(coded[..., None] & (scale < math.inf)[..., None], (wide / scale[..., None]).round(), 0)
    return codes.to(torch.int8), torch.where(scale.isfinite(), scale, math.nan)
