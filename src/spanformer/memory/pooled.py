"""A layer's memory in decoding of heads that see their own block exactly and earlier blocks pooled (low rank).

Keys and values of a row's last tokens lie in a ring of C = size + slack slots, token t in slot t mod C; a block that is
finished is pooled into one slot of a ring of P = blocks + ⌈slack / size⌉. Tokens that `crop` takes back leave their
slots as they are: no later token looks so far back, until others are written over them.

Shapes: B batch, Hkv key/value heads, T new tokens, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall, MemoryShape
from spanformer.ops import Attended, Rule, attend, merge


class PooledBlocks:
    """Written in place. `size`: tokens of a block; `blocks`: earlier ones that a token sees."""

    tokens = 0

    def __init__(self, shape: MemoryShape, size: int, blocks: int, held: dict[str, Tensor] | None = None) -> None:
        self.shape, self.size, self.blocks = shape, size, blocks
        self._held = self._empty() if held is None else held

    def _empty(self) -> dict[str, Tensor]:
        s = self.shape
        recent, pooled = self.size + s.slack, self.blocks - (-s.slack // self.size if self.blocks else 0)
        with torch.inference_mode(False):  # to be written to in or out of it
            made = {
                name: torch.zeros(s.batch, s.kv_heads, slots, s.head_dim, dtype=s.dtype, device=s.device)
                for name, slots in (("keys", recent), ("values", recent), ("pooled_k", pooled), ("pooled_v", pooled))
            }
            seen = torch.zeros(s.batch, 2, dtype=torch.int64, device=s.device)
            return made | {"seen": seen}  # tokens of each row, and how many of them can be taken back

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism, held, size = call.mechanism, self._held, self.size
        if refused := mechanism.supports(position=call.position):
            raise ValueError(refused[0])
        q, new_k = call.position.encode(call.q, call.k, call.view)
        t, seen = q.shape[2], held["seen"][:, 0]
        at = seen[:, None] + torch.arange(1 - size, t, device=q.device)  # [B, size − 1 + T]: positions of the keys
        old = at[:, : size - 1]
        k, v = (torch.cat([_slots(held[name], old), new], 2) for name, new in (("keys", new_k), ("values", call.v)))
        of = at.div(size, rounding_mode="floor")  # their blocks
        own = Rule(mechanism.heads, reach=size, documents=(of[:, size - 1 :], of))
        found = [attend(q, k, v, own, backend=mechanism.backend)]
        real = torch.full_like(seen, t) if call.view.padding is None else (~call.view.padding).sum(1)
        blocks = self._pool(mechanism.pooling, k, v, seen, real)
        if self.blocks:
            finished = seen // size
            slots = torch.arange(held["pooled_k"].shape[2], device=q.device)
            earlier = finished[:, None] - 1 - (finished[:, None] - 1 - slots) % len(slots)
            k, v = (
                torch.cat([held[name], more], 2) for name, more in zip(("pooled_k", "pooled_v"), blocks, strict=True)
            )
            new = finished[:, None] + torch.arange(blocks[0].shape[2], device=q.device)
            where = torch.cat([earlier, new], 1)
            hidden = torch.zeros(where.shape, device=q.device).masked_fill(where < 0, -torch.inf)[:, None]
            rule = Rule(mechanism.heads, reach=self.blocks, key_bias=hidden)  # block c − 1 is the nearest of block c
            asking = of[:, size - 1 :] - 1
            found.append(attend(q, k, v, rule, backend=mechanism.backend, q_positions=asking, k_positions=where))
        self._write(new_k, call.v, blocks, seen, real)
        return merge(found), None

    def _pool(self, pooling, k: Tensor, v: Tensor, seen: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, Hkv, size − 1 + T, D] → of the block of the first new token and all after it, finished or not."""
        b, _, t, _ = k.shape
        count, first = -(-t // self.size), self.size - 1 - seen % self.size
        step = torch.arange(count * self.size, device=k.device)
        index = (first[:, None] + step).clamp(max=t - 1)
        absent = step >= (seen % self.size + real)[:, None]
        k, v = (x.gather(2, index[:, None, :, None].expand(b, x.shape[1], -1, x.shape[3])) for x in (k, v))
        pooled_k, pooled_v, _ = pooling(k, v, absent)
        return pooled_k, pooled_v

    def _write(self, k: Tensor, v: Tensor, blocks: tuple[Tensor, Tensor], seen: Tensor, real: Tensor) -> None:
        held = self._held
        step = torch.arange(k.shape[2], device=k.device)
        recent = held["keys"].shape[2]
        kept = (step < real[:, None]) & (step >= real[:, None] - recent)
        for name, x in (("keys", k), ("values", v)):
            _put(held[name], (seen[:, None] + step) % recent, x, kept)
        step = torch.arange(blocks[0].shape[2], device=k.device)
        before, after = seen // self.size, (seen + real) // self.size
        new, slots = before[:, None] + step, held["pooled_k"].shape[2]
        kept = (new < after[:, None]) & (new >= after[:, None] - slots)
        for name, x in zip(("pooled_k", "pooled_v"), blocks, strict=True):
            if slots:
                _put(held[name], new % slots, x, kept)
        held["seen"] = torch.stack([seen + real, (held["seen"][:, 1] + real).clamp(max=self.shape.slack)], 1)

    def keep(self, states: Tensor) -> PooledBlocks:
        return self

    def crop(self, back: Tensor) -> PooledBlocks:
        seen = self._held["seen"]
        back = back.to(seen.device)
        if bool((short := back > seen[:, 1]).any()):
            row = int(short.nonzero()[0, 0])
            raise ValueError(
                f"row {row} cannot be cropped by {int(back[row])} tokens: at most {self.shape.slack} tokens can be "
                f"taken back, and {int(seen[row, 1])} are left; make the cache with more slack"
            )
        return self.with_tensors(self._held | {"seen": seen - back[:, None]})

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def tensors(self) -> dict[str, Tensor]:
        return self._held

    def with_tensors(self, tensors: dict[str, Tensor]) -> PooledBlocks:
        return PooledBlocks(replace(self.shape, batch=len(tensors["seen"])), self.size, self.blocks, dict(tensors))


def _slots(ring: Tensor, at: Tensor) -> Tensor:
    """ring [B, Hkv, C, D], positions [B, n] → [B, Hkv, n, D]"""
    index = (at % ring.shape[2])[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3])
    return ring.gather(2, index)


def _put(ring: Tensor, slots: Tensor, x: Tensor, kept: Tensor) -> None:
    """Write x [B, Hkv, n, D] to slots [B, n] of a ring, where kept [B, n]."""
    rows, at = kept.nonzero(as_tuple=True)
    ring[rows, :, slots[rows, at]] = x[rows, :, at].to(ring.dtype)
