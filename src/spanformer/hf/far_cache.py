"""The linear states of one layer of a SpanCache: the sums of all tokens that have left the rings of their heads.

A token joins its head's state when the ring overwrites it. Until then it is in the ring, where the far part of its
weight, 1 − m(d), is computed pair by pair. So with `slack` more slots in a ring, that many tokens can be taken back:
none of them has pushed a token into the state that the shorter text would see exactly.

Shapes: B batch, H query heads with a state, G key/value heads with one, T new tokens, n positions of a block, m
features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.hf.far import FarMap
from spanformer.hf.spans import HeadSpans
from spanformer.memory import HeadCache, read_positions
from spanformer.ops import Attended, merge

QUERIES = 256
"""queries at a time: weights of pairs are [B, H, queries, n]"""


class Block(NamedTuple):
    """Tokens that may have a far weight, or join a state: each head's first ones that have not joined."""

    positions: Tensor
    """[B, G, n]"""
    features: Tensor
    """[B, G, n, m]: ψ(k)"""
    values: Tensor
    """[B, G, n, Dv]"""


class FarState:
    """s [B, G, m, Dv] and z [B, G, m] in float32."""

    def __init__(self, spans: HeadSpans, far: FarMap, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spans, self.far, self.kv_heads, self.heads = spans, far, far.kv_on(), far.heads_on()
        wide = torch.promote_types(dtype, torch.float32)
        with torch.inference_mode(False):  # so that both modes can write to it
            self.s = torch.zeros(
                batch, len(self.kv_heads), far.features, far.value_size, dtype=wide, device=device
            )  # fmt: skip
            self.z = self.s.new_zeros(self.s.shape[:3])
            self.joined = torch.zeros(batch, len(self.kv_heads), dtype=torch.int64)
            """[B, G] positions below it are in the state; on the CPU, as `HeadCache.place`"""

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.s, self.z))

    def rows(self, index: Tensor) -> FarState:
        """A new object whose row b is a copy of row index[b]."""
        other = object.__new__(FarState)
        other.__dict__.update(self.__dict__)
        other.s, other.z = (t.index_select(0, index.to(t.device)) for t in (self.s, self.z))
        other.joined = self.joined[index.cpu()]
        return other

    @torch.no_grad()
    def block(self, rings: HeadCache, k: Tensor, v: Tensor, slack: int) -> Block:
        """k and v [B, Hkv, T, ·] of new tokens. To be called before the rings store them."""
        t, place = k.shape[2], rings.place[:, None, None]
        n = t + slack + math.ceil(self.spans.ramp) + 1  # from the first that has not joined to the last beyond a span
        positions = self.joined[..., None] + torch.arange(n)
        held = read_positions(rings.store, self.kv_heads, positions, rings.dtype)
        fresh = (positions - place).clamp(0, t - 1).to(k.device)[..., None]
        stored = (positions < place).to(k.device)[..., None]
        keys, values = (
            torch.where(stored, old, new[:, self.kv_heads].gather(2, fresh.expand(-1, -1, -1, new.shape[3])))
            for old, new in zip(held, (k, v), strict=True)
        )
        return Block(positions.to(k.device), self.far.of_keys(keys), values)

    @torch.no_grad()
    def attend(self, near: Attended, q: Tensor, block: Block, place: Tensor) -> Tensor:
        """[B, all heads, T, Dv]: near, exact attention of q [B, all heads, T, D] at positions place [B] and after, and
        the states."""
        parts = [self._attend(near, q, block, place, at) for at in torch.arange(q.shape[2]).split(QUERIES)]
        out = near.out.clone()
        out[:, self.heads] = torch.cat(parts, 2).to(out.dtype)
        return out

    def _attend(self, near: Attended, q: Tensor, block: Block, place: Tensor, at: Tensor) -> Tensor:
        rows, shared = slice(int(at[0]), int(at[-1]) + 1), len(self.heads) // len(self.kv_heads)
        features, mass = self.far.of_queries(q[:, self.heads, rows], self.heads)
        wide, features = self.s.dtype, features.unflatten(1, (-1, shared))  # [B, G, H / G, T, m]
        distance = (place[:, None] + at).to(q.device)[:, None, :, None] - block.positions[:, :, None]  # [B, G, T, n]
        near_z = self.spans.span_tokens().detach()[self.heads].to(wide).view(-1, shared, 1, 1)
        weight = ((distance[:, :, None] - near_z) / self.spans.ramp).clamp(0, 1).to(wide)
        weight = weight * (block.positions >= self.spans.sink_tokens)[:, :, None, None]
        pairs = (features @ block.features[:, :, None].transpose(3, 4)) * weight
        numerator = pairs @ block.values[:, :, None].to(wide) + features @ self.s[:, :, None]
        total = pairs.sum(4) + (features * self.z[:, :, None, None]).sum(4)
        out = (numerator / total.clamp(min=torch.finfo(wide).tiny)[..., None]).flatten(1, 2)
        lse = total.log().flatten(1, 2) + mass
        exact = Attended(near.out[:, self.heads, rows].to(wide), near.lse[:, self.heads, rows].to(wide))
        return merge([exact, Attended(out, lse)]).out

    @torch.no_grad()
    def join(self, block: Block, place: Tensor, slack: int) -> None:
        """What the rings no longer hold once their next positions are place [B] joins the states."""
        keeps = self.spans.keeps()
        upto = place[:, None] - torch.tensor([keeps[g] + slack for g in self.kv_heads])
        upto = torch.maximum(upto, self.joined)
        bounds = [t.to(block.positions.device)[..., None] for t in (self.joined, upto)]
        leaves = (block.positions >= bounds[0]) & (block.positions < bounds[1])
        leaves &= block.positions >= self.spans.sink_tokens
        features = block.features * leaves[..., None]
        self.s += features.transpose(2, 3) @ block.values.to(self.s.dtype)
        self.z += features.sum(2)
        self.joined = upto

    def start(self, k: Tensor, v: Tensor, lengths: Tensor, slack: int) -> None:
        """Read the beginning of a text: k and v [B, Hkv, T, ·], of which lengths [B] tokens are real."""
        positions = torch.arange(k.shape[2], device=k.device).expand(len(k), len(self.kv_heads), -1)
        block = Block(positions, self.far.of_keys(k[:, self.kv_heads]), v[:, self.kv_heads])
        self.join(block, lengths, slack)
