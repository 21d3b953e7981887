"""A layer's memory of blocks of tokens: the newest exactly, and of older ones the best keys for each query
(attention/retrieval.py, attention/memorizing.py).

A block that leaves the ring is written to a store, a ring of `capacity` keys and values with 8-bit codes of the keys,
which the search scans: in constant time, over the oldest. Token p has row p mod N of it. A row whose scale is NaN is
found by no search: it is empty, or padding. Nothing has a gradient into the store.

Shapes: B batch, R ring, N rows of the store, t new tokens of a piece, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall
from spanformer.memory.block_layout import NONE, Layout, Piece, Tensors, of_new, placed
from spanformer.memory.block_read import Keys, read
from spanformer.memory.blocks import Blocks
from spanformer.ops import Attended
from spanformer.ops.retrieve import attend_rows, find_rows
from spanformer.ops.search import Codes, quantise


@dataclass(frozen=True)
class StoreLayout(Layout):
    capacity: int
    """tokens before the ring that a query can find"""
    raw: bool
    """whether the store has keys without their positions"""

    @property
    def kept(self) -> int:
        return 0

    @property
    def rows(self) -> int:
        """N: those that are found, and those that a crop brings back into sight."""
        return self.capacity + self.sizes.block * -(-self.shape.slack // self.sizes.block)

    def groups(self) -> list[tuple[list[int], int]]:
        return [(list(range(self.shape.kv_heads)), 0)]

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, float]]:
        b, h, n, d, dtype = self.shape.batch, self.shape.kv_heads, self.rows, self.shape.head_dim, self.shape.dtype
        found = super().tensors()
        del found["slots" if not self.shape.in_place else "states"]
        if self.raw and self.shape.in_place:
            found["raw"] = ((b, h, self.ring, d), dtype, 0)
        return found | {
            "store_keys": ((b, h, n, d), dtype, 0),
            "store_values": ((b, h, n, d), dtype, 0),
            "codes": ((b, h, n, d), torch.int8, 0),
            "scales": ((b, h, n), torch.float32, math.nan),
            "bounds": ((b, h, 2), torch.float32, 0),  # of the codes: the largest error, and the longest key
            "store_at": ((b, n), torch.int64, NONE),
            "store_document": ((b, n), torch.int64, NONE),
        }


class Retrieved(Blocks):
    layout: StoreLayout

    def _prepared(self, call: LayerCall) -> LayerCall:
        mechanism = call.mechanism

        def project(states: Tensor, kv_heads: list[int] | None) -> tuple[Tensor, Tensor]:
            k, v = call.project(states, kv_heads)
            return mechanism.key_vectors(k), v

        q = mechanism.query_vectors(call.q)
        return replace(call, q=q, keys=lambda: mechanism.key_vectors(call.k), project=project)

    def _read(self, held: Tensors, call: LayerCall, piece: Piece, exact: Keys | None) -> Attended:
        near = read(self.layout, held, call, piece, exact)
        return call.mechanism.combine(near, *self._search(held, call, piece))

    def _stored(self, piece: Piece) -> int:
        """Rows of the store that may be in use: a number that costs no wait in training."""
        block = int(piece.block.max()) if piece.start is None else piece.start // self.layout.sizes.block
        return min(self.layout.rows, (block - self.layout.sizes.behind) * self.layout.sizes.block)

    def _search(self, held: Tensors, call: LayerCall, piece: Piece) -> tuple[Attended | None, Tensor | None]:
        """Attention to the best rows, and [B, H, t] the most that all others weigh together, as a logarithm."""
        count, (b, h, _, d), kv = self._stored(piece), call.q.shape, self.layout.shape.kv_heads
        if count <= 0:
            return None, None
        some, view = slice(piece.first, piece.last), call.view
        q = call.q[:, :, some]
        if not self.layout.raw:
            q, _ = call.position.encode(q, call.k[:, :, :0], placed(view, piece.at, piece.at[:, :0]))
        seen, document = self._visible(held, call, piece), of_new(view.documents, call.q.shape[2], some)
        scales = held["scales"] if seen is None else held["scales"].masked_fill(~seen[:, None], math.nan)
        flat = q.reshape(b * kv, -1, d)
        codes = Codes(b * kv, d)
        codes.rows, codes.scales, codes.count = held["codes"].flatten(0, 1), scales.flatten(0, 1), count
        codes.error, codes.longest = held["bounds"].flatten(0, 1).unbind(1)
        keys, values = held["store_keys"].flatten(0, 1), held["store_values"].flatten(0, 1)
        ids = find_rows(codes, keys, flat, call.mechanism.k)
        if document is not None:  # documents that begin inside the piece have nothing in the store
            begun = (document != document[:, :1]).repeat(1, h // kv).repeat_interleave(kv, 0)
            ids = ids.masked_fill(begun[..., None], -1)
        found = attend_rows(flat, keys, values, ids, 1 / math.sqrt(d))
        there = codes.scales[:, :count].isfinite().sum(1, keepdim=True) - ids.shape[2]
        rest = there.clamp(min=0).to(found.lowest.dtype).log() + found.lowest
        rest = torch.where(found.lse == -math.inf, -math.inf, rest)
        out, lse, rest = (t.view(b, h, -1, *t.shape[2:]) for t in (found.out, found.lse, rest))
        return Attended(out, lse), rest

    def _visible(self, held: Tensors, call: LayerCall, piece: Piece) -> Tensor | None:
        """[B, N] bool: rows that a piece may find; None: all. Rows that a crop may bring back, and those of other
        documents, are hidden."""
        document = of_new(call.view.documents, call.q.shape[2], slice(piece.first, piece.first + 1))
        if not self.layout.shape.slack and document is None:
            return None
        at, first = held["store_at"], (piece.block[:, None] - self.layout.sizes.behind) * self.layout.sizes.block
        seen = (at < first) & (at >= first - self.layout.capacity)
        return seen if document is None else seen & (held["store_document"] == document)

    @torch.no_grad()
    def _leave(self, held: Tensors, call: LayerCall, piece: Piece) -> None:
        rows = self._ending(call, piece)
        if rows is None:
            return
        block, layout = self._leaving(held, piece, rows), self.layout
        row, slot = rows[:, None], block.slot
        if layout.shape.in_place:
            k, v = held["raw" if layout.raw else "keys0"][row, :, slot], held["values0"][row, :, slot]
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = call.project(held["states"][row, slot], None)
            if not layout.raw:
                _, k = call.position.encode(call.q[rows][:, :, :1], k, placed(call.view, block.at[:, :1], block.at))
        codes, scales = quantise(k.float())
        sizes = [(k.float() - codes * scales[..., None]).norm(dim=3), k.float().norm(dim=3)]
        # without keys that are not finite, which no search finds
        bounds = torch.stack([size.nan_to_num(0.0, 0.0, 0.0).amax(2) for size in sizes], 2)
        held["bounds"][rows] = torch.maximum(held["bounds"][rows], bounds)
        scales = scales.masked_fill(~block.present[:, None], math.nan)
        place = block.at % layout.rows
        for name, t in (("store_keys", k), ("store_values", v), ("codes", codes), ("scales", scales)):
            if not layout.shape.in_place:
                held[name] = held[name].clone()  # autograd keeps those that earlier pieces have read
            held[name][row, :, place] = t.transpose(1, 2).to(held[name].dtype)
        held["store_at"][row, place] = torch.where(block.present, block.at, NONE)
        held["store_document"][row, place] = block.document.expand(place.shape)

    def values_at(self, positions: Tensor) -> Tensor:
        """[Hkv, n, D] what the first row's store has as values at these positions [n]: for checks."""
        return self.tensors()["store_values"][0][:, positions % self.layout.rows]
