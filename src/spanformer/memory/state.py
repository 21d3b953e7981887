"""The state between segments: a memory for each layer, and the documents and padding of its tokens.

Shapes: B batch, M remembered tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spanformer.memory.base import LayerMemory, pick, rows_of


@dataclass(frozen=True, eq=False)
class State:
    """The state of a model between segments. Layers may have memories of different lengths."""

    layers: tuple[LayerMemory, ...]
    seen: int = 0
    """number of tokens so far, in memory or not"""
    documents: Tensor | None = None
    """[B, longest M] ids, if the text consists of packed documents"""
    padding: Tensor | None = None
    """[B, longest M] bool, True where a token is padding"""
    offset: Tensor | None = None
    """[B] the position of each text's first token, if texts begin at random positions"""
    beside: State | None = None
    """of a frozen model that reads the same text to find neighbours; no part of `tensors`"""

    def tokens(self) -> list[int]:
        """[layers] the number of earlier tokens in each layer's memory."""
        return [layer.tokens for layer in self.layers]

    def tensors(self) -> dict[str, Tensor]:
        """Each layer's tensors, by names such as 0.hidden, and the offset; all have the batch as their first axis."""
        found = {f"{n}.{name}": t for n, layer in enumerate(self.layers) for name, t in layer.tensors().items()}
        return found if self.offset is None else found | {"offset": self.offset}

    def with_tensors(self, tensors: dict[str, Tensor], seen: int) -> State:
        """A state like this one with these tensors, named as in `tensors`."""
        layers = (layer.with_tensors(pick(tensors, n)) for n, layer in enumerate(self.layers))
        return replace(self, layers=tuple(layers), seen=seen, offset=tensors.get("offset"))

    def rows(self, rows: slice | Tensor) -> State:
        """The state of some rows of the batch, by a slice or by their indices."""
        batch = len(next(iter(self.tensors().values())))
        if isinstance(rows, slice) and len(range(*rows.indices(batch))) == batch:
            return self
        return replace(
            self,
            layers=tuple(rows_of(layer, rows) for layer in self.layers),
            documents=None if self.documents is None else self.documents[rows],
            padding=None if self.padding is None else self.padding[rows],
            offset=None if self.offset is None else self.offset[rows],
            beside=None if self.beside is None else self.beside.rows(rows),
        )

    @staticmethod
    def stack(states: list[State]) -> State:
        """One state from the rows of several."""
        first = states[0]
        if len(states) == 1:
            return first
        held = [s.tensors() for s in states]
        return replace(
            first.with_tensors({name: torch.cat([each[name] for each in held]) for name in held[0]}, first.seen),
            documents=None if first.documents is None else torch.cat([_there(s.documents) for s in states]),
            padding=None if first.padding is None else torch.cat([_there(s.padding) for s in states]),
            beside=None if first.beside is None else State.stack([s.beside for s in states if s.beside is not None]),
        )


def _there(t: Tensor | None) -> Tensor:
    if t is None:
        raise ValueError("some of the states have documents or padding and others do not; expected all or none")
    return t
