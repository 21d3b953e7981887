"""The memory of a convolution over tokens: its newest inputs, for training and for decoding.

    c_t = Σ_j w_j · x_(t−j)

A causal convolution of K taps needs the last K − 1 inputs; with slack, as many more as `crop` may take back. Padding is
no token: the convolution passes over it, wherever it stands. A document does not see the one before it.

Shapes: B batch, T new tokens, M remembered ones, N tokens that still run, K taps, dim of hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.memory.base import ByHead, HeadPart, LayerCall, LayerMemory, MemoryShape

NO_DOCUMENT = -1


class Inputs:
    """states [B, M, dim], the newest last; absent [B, M] bool: before the first token; documents [B, M] their ids. It
    is a part of a layer's memory (`beside`)."""

    tokens = 0

    def __init__(self, states: Tensor, absent: Tensor, documents: Tensor) -> None:
        self.states, self.absent, self.documents = states, absent, documents
        self._next: Inputs | None = None

    @classmethod
    def start(cls, past: int, dim: int, shape: MemoryShape) -> Inputs:
        """Of no token yet. past: how many inputs the convolution needs, K − 1, or 0 if it is not causal."""
        held = past + shape.slack if past else 0
        with torch.inference_mode(False):
            states = torch.zeros(shape.batch, held, dim, dtype=shape.dtype, device=shape.device)
            absent = torch.ones(shape.batch, held, dtype=torch.bool, device=shape.device)
            return cls(states, absent, torch.full((shape.batch, held), NO_DOCUMENT, device=shape.device))

    def extend(self, x: Tensor, view: Any) -> Window:
        """The window that ends with the new tokens x [B, T, dim]; view: their `View`. `keep` then returns the memory
        after them."""
        documents = view.documents[1] if isinstance(view.documents, tuple) else view.documents
        new = x.shape[1]
        ids = self.absent.new_full((len(x), new), NO_DOCUMENT, dtype=torch.int64)
        ids = ids if documents is None else documents[:, documents.shape[1] - new :]
        padding = self.absent.new_zeros(len(x), new) if view.padding is None else view.padding
        padding = padding[:, padding.shape[1] - new :]
        states, absent = torch.cat([self.states.to(x.dtype), x], 1), torch.cat([self.absent, padding], 1)
        ids, held = torch.cat([self.documents, ids], 1), self.states.shape[1]
        place = torch.arange(held, held + new, device=x.device).expand(len(x), -1)
        if view.padding is not None:
            states, absent, ids, order = _absent_first(states, absent, ids)
            place = order.argsort(1)[:, held:]
        last = slice(states.shape[1] - held, None)
        self._next = Inputs(states[:, last].detach(), absent[:, last], ids[:, last])
        return Window(states, absent, None if documents is None else ids, place)

    def attend(self, call: LayerCall) -> Any:
        raise AssertionError("the inputs of a convolution have no attention")

    def keep(self, states: Tensor) -> Inputs:
        assert self._next is not None, "keep was called before extend"
        return self._next

    def crop(self, back: Tensor) -> Inputs:
        """Without each row's last back [B] tokens."""
        back = back.to(self.states.device)
        place = torch.arange(self.states.shape[1], device=back.device) - back[:, None]
        from_row = place.clamp(min=0)
        states = self.states.gather(1, from_row[..., None].expand_as(self.states))
        absent = self.absent.gather(1, from_row) | (place < 0)
        return Inputs(states, absent, self.documents.gather(1, from_row))

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        return {"inputs": self.states, "absent": self.absent, "documents": self.documents}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Inputs:
        return Inputs(tensors["inputs"], tensors["absent"], tensors["documents"])


class Window(NamedTuple):
    """Remembered and new tokens, M + T of each row; what is absent comes first."""

    states: Tensor
    """[B, M + T, dim]"""
    absent: Tensor
    """[B, M + T] bool"""
    documents: Tensor | None
    """[B, M + T]"""
    place: Tensor
    """[B, T] where each new token is"""

    def taps(self, offsets: range, active: Tensor | None) -> list[Tensor]:
        """The inputs [N, dim] at each distance back of the active tokens [N], as indices into B · T (None: all), or 0
        where there is none."""
        rows, length = self.states.flatten(0, 1), self.states.shape[1]
        row = torch.arange(len(self.place), device=rows.device)[:, None].expand_as(self.place).flatten()
        place = self.place.flatten()
        if active is not None:
            row, place = row[active], place[active]
        here, found = row * length + place, []
        for back in offsets:
            at = place - back
            inside = (at >= 0) & (at < length)
            index = torch.where(inside, here - back, here)
            seen = inside & ~self.absent.flatten()[index]
            if self.documents is not None:
                seen = seen & (self.documents.flatten()[index] == self.documents.flatten()[here])
            # not a product with 0: what nobody wrote may be NaN
            found.append(rows.index_select(0, index).masked_fill(~seen[:, None], 0))
        return found


def beside(memory: LayerMemory, mechanism: Any, inputs: Inputs) -> ByHead:
    """A layer's memory with the inputs of its convolution, a part without a mechanism."""
    parts = memory.parts if isinstance(memory, ByHead) else [HeadPart(mechanism, memory)]
    return ByHead([*parts, HeadPart(None, inputs)])


def inputs_of(memory: LayerMemory) -> Inputs:
    """The inputs in a layer's memory."""
    assert isinstance(memory, ByHead) and isinstance(memory.parts[-1].memory, Inputs)
    return memory.parts[-1].memory


def _absent_first(states: Tensor, absent: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row with what is absent first; the order of the others stays. And that order [B, M + T]."""
    order = absent.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    states = states.gather(1, order[..., None].expand_as(states))
    return states, absent.gather(1, order), ids.gather(1, order), order
