"""What a policy remembers between steps: one protocol for transformers and baselines.

Shapes: N rows, one for each environment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, Self

import torch
from torch import Tensor

from spanformer.memory import State


class PolicyMemory(Protocol):
    def rows(self, index: Tensor) -> Self:
        """The memory of some rows."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name; every tensor has the rows as its first axis."""
        ...

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """A memory like this one with these tensors."""
        ...


class Carried:
    """Tensors that a recurrent baseline carries from step to step; none for a policy without memory."""

    def __init__(self, carried: dict[str, Tensor]) -> None:
        self.carried = carried

    def rows(self, index: Tensor) -> Carried:
        return Carried({name: t[index] for name, t in self.carried.items()})

    def tensors(self) -> dict[str, Tensor]:
        return self.carried

    def with_tensors(self, tensors: dict[str, Tensor]) -> Carried:
        return Carried(tensors)


class Segments:
    """The state of a stack. The episode of each remembered step is its document, so that no step sees another
    episode."""

    def __init__(self, state: State) -> None:
        self.state = state

    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.state.tensors().values())))

    def rows(self, index: Tensor) -> Segments:
        return Segments(self.state.rows(index))

    def tensors(self) -> dict[str, Tensor]:
        held = self.state.tensors()
        rows = self.count()
        documents = self.state.documents
        documents = torch.zeros(rows, 0, dtype=torch.int64) if documents is None else documents
        return held | {"documents": documents, "seen": torch.full((rows,), self.state.seen)}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Segments:
        seen = int(tensors["seen"][0])
        state = self.state.with_tensors(tensors, seen)
        return Segments(replace(state, documents=tensors["documents"] if seen else None))


def compact(memory: PolicyMemory) -> PolicyMemory:
    """A copy in memory of its own: products over views with other strides round differently, and a resumed run must
    repeat every bit."""
    return memory.with_tensors({name: t.contiguous().clone() for name, t in memory.tensors().items()})
