"""A layer's memory of blocks of tokens: the newest exactly, older ones compressed (attention/compressive.py).

A block that leaves the ring becomes `block`/`ratio` compressed slots, in a ring of their own; decoding also stores the
hidden states that are still to be compressed.

Shapes: B batch, R ring, N compressed slots, n of a block, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall
from spanformer.memory.block_layout import NONE, Piece, Tensors, placed
from spanformer.memory.block_read import Keys, read
from spanformer.memory.blocks import Blocks, Leaving
from spanformer.ops import Attended


class Slots(NamedTuple):
    old: Tensor
    """[b, block, dim] states of the block; 0 where no token is present"""
    new: Tensor
    """[b, n, dim] compressed"""
    at: Tensor
    """[b, n] positions"""


class Compressed(Blocks):
    def _read(self, held: Tensors, call: LayerCall, piece: Piece, exact: Keys | None) -> Attended:
        layout = self.layout
        if exact is not None:  # heads whose span has grown since the last segment see slots, too
            far = call.mechanism.far_heads(layout.shape.kv_heads)
            layout = replace(layout, sizes=replace(layout.sizes, far=far))
        return read(layout, held, call, piece, exact)

    def _leave(self, held: Tensors, call: LayerCall, piece: Piece) -> Tensor | None:
        """In training, the loss of compressing the block, also while the piece's block has not ended."""
        ending, mechanism, sizes = self._ending(call, piece), call.mechanism, self.layout.sizes
        learns = (
            mechanism.learns_to_compress
            and piece.start is not None
            and piece.start // sizes.block >= sizes.behind
        )  # fmt: skip
        if ending is None and not learns:
            return None
        rows = torch.arange(len(call.q), device=call.q.device) if ending is None else ending
        block = self._leaving(held, piece, rows)
        slots = self._compressed(held, mechanism, block)
        if ending is not None:
            self._put(held, call, block, slots)
        if not learns:
            return None
        q = call.q[:, :, piece.first : piece.last].detach()
        return mechanism.compression_loss(q, slots.old, block.present, slots.new, call.project_frozen)

    def _compressed(self, held: Tensors, mechanism: Any, block: Leaving) -> Slots:
        sizes, row, present = self.layout.sizes, block.rows[:, None], block.present
        old = held["states"][row, block.slot].masked_fill(~present[..., None], 0)
        if sizes.most_used:
            usage = held["usage"][row, block.slot].masked_fill(~present, -torch.inf)
            pick = usage.topk(sizes.per_block, dim=1).indices.sort(1).values
            new, there = old.gather(1, pick[..., None].expand(-1, -1, sizes.dim)), present.gather(1, pick)
            at = block.at.gather(1, pick)
        else:
            new, there = mechanism.compress(old), present.view(len(old), -1, sizes.ratio).any(2)
            at = block.at[:, (sizes.ratio - 1) // 2 :: sizes.ratio]
        return Slots(old, new, torch.where(there, at, NONE))

    @torch.no_grad()
    def _put(self, held: Tensors, call: LayerCall, block: Leaving, slots: Slots) -> None:
        layout, row, at = self.layout, block.rows[:, None], slots.at
        n, new = layout.sizes.per_block, slots.new.detach()
        slot = (block.number[:, None] * n + torch.arange(n, device=row.device)) % layout.kept
        held["at"][row, slot], held["document"][row, slot] = at, block.document.expand(at.shape)
        if not layout.shape.in_place:
            # a copy: autograd keeps the slots that earlier pieces were projected from
            held["slots"] = held["slots"].index_put((row, slot), new.to(held["slots"].dtype))
            return
        for g, (heads, kept) in enumerate(layout.groups()):
            if kept:
                k, v = call.project(new, heads)
                queries = [h * call.shared + m for h in heads for m in range(call.shared)]
                places = placed(call.view, at[:, :1].clamp(min=0), at.clamp(min=0))
                _, k = call.position.encode_for(queries)(call.q[block.rows][:, queries, :1], k, places)
                held[f"keys{g}"][row, :, slot] = k.transpose(1, 2)
                held[f"values{g}"][row, :, slot] = v.transpose(1, 2)
