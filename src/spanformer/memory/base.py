"""The memory of a layer: one protocol for training and decoding.

    HiddenStates    training: hidden states of earlier segments, projected anew so that gradients reach the projections
    RingMemory      decoding: keys and values in rings, one ring for each key/value head
    ByHead          several memories in one layer, each for some of its heads

A mechanism with another memory, such as a recurrent state, makes it itself (`Attention.new_memory`); the same class
then serves training and decoding.
Shapes: B batch, T new tokens, M remembered ones, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from spanformer.ops import Attended

Project = Callable[[Tensor, "list[int] | None"], tuple[Tensor, Tensor]]
"""(hidden states [B, M, dim], key/value heads or None for all) → keys and values [B, heads, M, D]"""
M = TypeVar("M", bound="LayerMemory")


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer's attention over new tokens: what a memory is given."""

    mechanism: Any
    """the layer's `Attention`"""
    position: Any
    """the layer's `Position`"""
    view: Any
    """`View` of the new tokens: x, documents and padding of remembered and new tokens, start: the position of the
    first new token"""
    q: Tensor
    """[B, H, T, D], not rotated"""
    k: Tensor
    """[B, Hkv, T, D] of the new tokens, not rotated"""
    v: Tensor
    """[B, Hkv, T, D] of the new tokens"""
    project: Project

    @property
    def shared(self) -> int:
        """Query heads of each key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def for_heads(self, first: int, mechanism: Any) -> LayerCall:
        """The call of some query heads alone, those from `first` on that this mechanism has."""
        heads = mechanism.heads
        some = slice(first // self.shared, (first + heads) // self.shared)
        every = list(range(some.start, some.stop))

        def project(states: Tensor, kv_heads: list[int] | None) -> tuple[Tensor, Tensor]:
            return self.project(states, every if kv_heads is None else [every[g] for g in kv_heads])

        return replace(
            self, mechanism=mechanism, position=self.position.for_heads(first, heads), project=project,
            q=self.q[:, first : first + heads], k=self.k[:, some], v=self.v[:, some],
        )  # fmt: skip


@dataclass(frozen=True)
class MemoryShape:
    """The sizes that a mechanism needs to make its own memory."""

    batch: int
    kv_heads: int
    """of its heads alone, where other heads of the layer have another memory"""
    head_dim: int
    slack: int = 0
    """how many tokens `crop` must be able to take back"""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"


class LayerMemory(Protocol):
    """The memory of one layer. `keep` returns the next memory and leaves this one unchanged, so that a segment can run
    twice; only rings are written in place."""

    @property
    def tokens(self) -> int:
        """How many earlier tokens it needs documents and padding of."""
        ...

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        """Attention of the new tokens over what is remembered and over themselves, and what to add to the loss."""
        ...

    def keep(self, states: Tensor) -> Self:
        """The memory after these new tokens, of which `states` [B, T, dim] are the layer's inputs."""
        ...

    def bytes(self) -> int:
        """Its size."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All tensors needed to continue, by name, for a checkpoint. Each has the batch as its first axis."""
        ...

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """A memory like this one that holds these, as `tensors` named them; the number of rows may be another."""
        ...


class OwnMemory(LayerMemory, Protocol):
    """A memory that a mechanism makes itself, for training and for decoding."""

    def crop(self, back: Tensor) -> Self:
        """The memory before each row's last back [B] tokens; at most `slack` of them can be taken back."""
        ...


def rows_of(memory: M, index: Tensor | slice) -> M:
    """A memory whose row b is this one's row index[b]."""
    return memory.with_tensors({name: t[index] for name, t in memory.tensors().items()})


class HeadPart(NamedTuple):
    """Heads of a layer that share one memory."""

    mechanism: Any
    """their `Attention`"""
    memory: Any
    """their `LayerMemory`; in a KV cache, their rings"""


class ByHead:
    """The memory of a layer whose heads have different memories, one part after the other."""

    def __init__(self, parts: Sequence[HeadPart]) -> None:
        self.parts = list(parts)

    @property
    def tokens(self) -> int:
        return max(part.memory.tokens for part in self.parts)

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        found, penalty, first = [], None, 0
        for mechanism, memory in self.parts:
            some, added = memory.attend(call.for_heads(first, mechanism))
            found.append(some)
            penalty = penalty if added is None else added if penalty is None else penalty + added
            first += mechanism.heads
        return Attended(*(torch.cat(each, 1) for each in zip(*found, strict=True))), penalty

    def keep(self, states: Tensor) -> ByHead:
        return self.change(lambda memory: memory.keep(states))

    def change(self, how: Callable[[Any], Any]) -> ByHead:
        """With another memory in place of each."""
        return ByHead([HeadPart(mechanism, how(memory)) for mechanism, memory in self.parts])

    def bytes(self) -> int:
        return sum(part.memory.bytes() for part in self.parts)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{n}.{name}": t for n, part in enumerate(self.parts) for name, t in part.memory.tensors().items()}

    def with_tensors(self, tensors: dict[str, Tensor]) -> ByHead:
        numbers = itertools.count()
        return self.change(lambda memory: memory.with_tensors(pick(tensors, next(numbers))))


def pick(tensors: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """The tensors whose name begins with "n.", without that."""
    found = ((name.partition("."), t) for name, t in tensors.items())
    return {name: t for (number, _, name), t in found if number == str(n)}
