"""The base of layer memories that cut a text into blocks: the newest tokens are stored exactly, in a ring.

Token p has slot p mod R of the ring, R = memory + block + slack. When block b ends, block b − memory/block leaves what
the next block sees exactly; a subclass says what becomes of it. What is visible follows from positions alone, so
segments of any length, one pass and decoding see the same, and a crop needs only room.
Training stores hidden states and projects them in every segment, so that gradients reach the projections; decoding
stores keys and values, and writes in place.

Shapes: B batch, T new tokens, R ring, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall, empty_tensors
from spanformer.memory.block_layout import NONE, Layout, Piece, Tensors, of_new, placed
from spanformer.memory.block_read import Keys, exact_keys
from spanformer.ops import Attended


class Leaving(NamedTuple):
    """Blocks that leave the ring, of some rows."""

    rows: Tensor
    """[b]"""
    number: Tensor
    """[b] of the block in its text"""
    at: Tensor
    """[b, block] positions"""
    slot: Tensor
    """[b, block] in the ring"""
    present: Tensor
    """[b, block] bool: no padding, and not of a document that ended inside the block: no later token sees those"""
    document: Tensor
    """[b, 1]"""


class Blocks:
    """Empty, or with what it holds."""

    tokens = 0

    def __init__(self, layout: Layout, held: Tensors | None = None) -> None:
        self.layout, self._held = layout, held
        self._next: Self | None = None

    def tensors(self) -> Tensors:
        if self._held is None:
            self._held = empty_tensors(self.layout.tensors(), self.layout.shape.device)
        return self._held

    def with_tensors(self, tensors: Tensors) -> Self:
        shape = replace(self.layout.shape, batch=len(tensors["room"]))
        return type(self)(replace(self.layout, shape=shape), dict(tensors))

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def keep(self, states: Tensor) -> Self:
        if self._next is None:
            raise ValueError("keep was called before attend; expected the tokens to be attended to first")
        return self._next

    def crop(self, back: Tensor) -> Self:
        held, shape = self.tensors(), self.layout.shape
        back = back.to(shape.device)
        if bool((back > held["room"]).any()):
            row = int((back > held["room"]).nonzero()[0, 0])
            raise ValueError(
                f"row {row} cannot be cropped by {int(back[row])} tokens: at most {shape.slack} tokens can be taken "
                f"back, and {int(held['room'][row])} are left; make the cache with more slack"
            )
        return self.with_tensors(held | {"room": held["room"] - back})

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism, view, shape = call.mechanism, call.view, self.layout.shape
        if refused := mechanism.supports(position=call.position):
            raise ValueError(refused[0])
        self._check(call)
        call, held, exact = self._prepared(call), self.tensors(), None
        if not shape.in_place:
            exact = exact_keys(self.layout, held, call)
            held = {name: t.clone() for name, t in held.items()}
        new, found = call.q.shape[2], []
        penalty = mechanism.penalty(mechanism.rule(view), view)
        for piece in self.layout.pieces(view, new):
            self._write(held, call, piece)
            found.append(self._read(held, call, piece, exact))
            added = self._leave(held, call, piece)
            if added is not None:
                added = added * ((piece.last - piece.first) / new)
                penalty = added if penalty is None else penalty + added
        real = new if view.padding is None else (~view.padding[:, -new:]).sum(1)
        held["room"] = (held["room"] + real).clamp(max=shape.slack)
        self._next = type(self)(self.layout, held)
        return Attended(*(torch.cat(each, 2) for each in zip(*found, strict=True))), penalty

    def _prepared(self, call: LayerCall) -> LayerCall:
        """The call with queries and keys as this memory has them."""
        return call

    def _read(self, held: Tensors, call: LayerCall, piece: Piece, exact: Keys | None) -> Attended:
        """Attention of a piece, whose tokens are in the ring. exact: None in decoding."""
        raise NotImplementedError

    def _leave(self, held: Tensors, call: LayerCall, piece: Piece) -> Tensor | None:
        """What becomes of the block that leaves when the piece's block ends; a term of the loss."""
        raise NotImplementedError

    def _check(self, call: LayerCall) -> None:
        at = self.tensors()["at"]
        if len(at) != len(call.q) or at.device != call.q.device:
            raise ValueError(
                f"the memory has {len(at)} rows on {at.device}, and the new tokens need {len(call.q)} rows on "
                f"{call.q.device}; begin with this model's start() or cache()"
            )

    @torch.no_grad()
    def _write(self, held: Tensors, call: LayerCall, piece: Piece) -> None:
        """Put the new tokens into the ring, except padding."""
        some, b, view, layout = slice(piece.first, piece.last), len(call.q), call.view, self.layout
        slot, new = (piece.at % layout.ring).expand(b, -1), call.q.shape[2]
        padding, document = (of_new(ids, new, some) for ids in (view.padding, view.documents))
        rows = torch.arange(b, device=slot.device)[:, None]

        def put(name: str, values: Tensor, first: int = 0) -> None:
            if name not in held:
                return
            t = held[name]
            index = (rows, slot + first) if t.ndim < 4 else (rows, slice(None), slot + first)
            if padding is not None:
                hidden = padding.view(*padding.shape, *[1] * (values.ndim - 2))
                values = torch.where(hidden, t[index].to(values.dtype), values)
            t[index] = values.to(t.dtype)

        put("at", piece.at.expand(b, -1), layout.kept)
        put("document", torch.full_like(slot, NONE) if document is None else document, layout.kept)
        put("states", view.x[:, some])
        put("usage", torch.zeros_like(slot, dtype=torch.float64))
        put("raw", call.k[:, :, some].transpose(1, 2))
        if layout.shape.in_place:
            _, k = call.position.encode(call.q[:, :, some], call.k[:, :, some], placed(view, piece.at, piece.at))
            for n, (heads, slots) in enumerate(layout.groups()):
                put(f"keys{n}", k[:, heads].transpose(1, 2), slots)
                put(f"values{n}", call.v[:, heads, some].transpose(1, 2), slots)

    def _ending(self, call: LayerCall, piece: Piece) -> Tensor | None:
        """Rows of which a block ends with the piece, and an earlier one leaves; None if there are none."""
        sizes = self.layout.sizes
        if piece.start is not None:
            ends = (piece.start + piece.last - piece.first) % sizes.block == 0
            leaves = ends and piece.start // sizes.block >= sizes.behind
            return torch.arange(len(call.q), device=call.q.device) if leaves else None
        ends = ((piece.at[:, -1] + 1) % sizes.block == 0) & (piece.block >= sizes.behind)
        padding = of_new(call.view.padding, call.q.shape[2], slice(piece.last - 1, piece.last))
        ends = ends.expand(len(call.q)) if padding is None else ends & ~padding[:, 0]
        rows = ends.nonzero()[:, 0]
        return rows if len(rows) else None

    def _leaving(self, held: Tensors, piece: Piece, rows: Tensor) -> Leaving:
        """The block that leaves when the piece's block ends, of some rows."""
        layout, block = self.layout, self.layout.sizes.block
        number = piece.block.expand(len(held["at"]))[rows] - layout.sizes.behind
        at = number[:, None] * block + torch.arange(block, device=rows.device)
        slot, row = at % layout.ring, rows[:, None]
        present = held["at"][row, layout.kept + slot] == at
        documents = held["document"][row, layout.kept + slot]
        newest = torch.where(present, at, NONE).argmax(1, keepdim=True)
        document = documents.gather(1, newest)
        return Leaving(rows, number, at, slot, present & (documents == document), document)
