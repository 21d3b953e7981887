"""The memory of a layer: one protocol for training and decoding.

    HiddenStates    training: hidden states of earlier segments, projected again so that gradients reach the projections
    RingMemory      decoding: keys and values in rings, one ring for each key/value head
    Blocks          both: the newest blocks exactly, older ones compressed (Compressed) or searched (Retrieved)
    ByHead          several memories in one layer, each for some of its heads

A mechanism with another memory, such as a recurrent state, returns it from `Attention.new_memory`; the same class
then serves training and decoding.
Shapes: B batch, T new tokens, M remembered ones, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import functools
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


def empty_tensors(
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype, float]], device: torch.device | str
) -> dict[str, Tensor]:
    """The tensors of a memory before its first token. layout: shape, dtype and initial value of each."""
    with torch.inference_mode(False):  # so that both modes can write to them
        each = layout.items()
        return {name: torch.full(size, value, dtype=dtype, device=device) for name, (size, dtype, value) in each}


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The arguments of one layer's attention over new tokens."""

    mechanism: Any
    """the layer's `Attention`"""
    position: Any
    """the layer's `Position`"""
    view: Any
    """`View` of the new tokens: x, documents and padding of remembered and new tokens, start: the position of the
    first new token"""
    q: Tensor
    """[B, H, T, D], not rotated"""
    keys: Callable[[], Tensor]
    """gives `k`; not called by a memory whose keys are the queries, so that nothing is projected in vain"""
    v: Tensor
    """[B, Hkv, T, D] of the new tokens"""
    project: Project
    project_frozen: Project
    """the same with weights that get no gradient"""

    @functools.cached_property
    def k(self) -> Tensor:
        """[B, Hkv, T, D] of the new tokens, not rotated"""
        return self.keys()

    @property
    def shared(self) -> int:
        """Query heads of each key/value head."""
        return self.q.shape[1] // self.v.shape[1]

    def for_heads(self, first: int, mechanism: Any) -> LayerCall:
        """The call for some query heads only: those from `first` on, as many as this mechanism has."""
        heads = mechanism.heads
        some = slice(first // self.shared, (first + heads) // self.shared)
        every = list(range(some.start, some.stop))

        def some_of(project: Project) -> Project:
            return lambda states, kv: project(states, every if kv is None else [every[g] for g in kv])

        return replace(
            self, mechanism=mechanism, position=self.position.for_heads(first, heads),
            project=some_of(self.project), project_frozen=some_of(self.project_frozen),
            q=self.q[:, first : first + heads], keys=lambda: self.k[:, some], v=self.v[:, some],
        )  # fmt: skip


def unread(call: LayerCall) -> Attended:
    """In place of the attention of tokens of which none is active (`View.nobody`): a layer does not read it."""
    return Attended(call.q, call.q[..., 0])


@dataclass(frozen=True)
class MemoryShape:
    """The sizes that a mechanism needs to make its own memory."""

    batch: int
    kv_heads: int
    """of this mechanism's heads only, if other heads of the layer have another memory"""
    head_dim: int
    slack: int = 0
    """how many tokens `crop` must be able to remove"""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    in_place: bool = False
    """whether `keep` may write over this memory, as decoding lets it; otherwise it must stay as it is"""


class LayerMemory(Protocol):
    """The memory of one layer. `keep` returns the next memory and leaves this one unchanged, so that a segment can run
    twice; only rings are written in place."""

    @property
    def tokens(self) -> int:
        """The number of earlier tokens whose documents and padding it needs."""
        ...

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        """Attention of the new tokens over the memory and over themselves, and a term to add to the loss."""
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
        """A memory like this one with these tensors, named as in `tensors`; the number of rows may differ."""
        ...


class OwnMemory(LayerMemory, Protocol):
    """A mechanism's own memory, for training and for decoding."""

    def crop(self, back: Tensor) -> Self:
        """The memory before each row's last back [B] tokens; `slack` is the most that can be removed."""
        ...


def rows_of(memory: M, index: Tensor | slice) -> M:
    """A memory whose row b is a copy of row index[b]."""
    return memory.with_tensors({name: t[index] for name, t in memory.tensors().items()})


class HeadPart(NamedTuple):
    """Heads of a layer that share one memory."""

    mechanism: Any
    """their `Attention`; None for the inputs of a feed-forward that convolves (inputs.py)"""
    memory: Any
    """their `LayerMemory`; in a KV cache, their rings"""


class ByHead:
    """The memory of a layer whose heads have different memories, in parts by head."""

    def __init__(self, parts: Sequence[HeadPart]) -> None:
        self.parts = list(parts)

    @property
    def tokens(self) -> int:
        return max(part.memory.tokens for part in self.parts)

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        found, penalty, first = [], None, 0
        attending = [part for part in self.parts if part.mechanism is not None]
        if len(attending) == 1:
            return attending[0].memory.attend(call)
        for mechanism, memory in attending:
            some, added = memory.attend(call.for_heads(first, mechanism))
            found.append(some)
            penalty = penalty if added is None else added if penalty is None else penalty + added
            first += mechanism.heads
        return Attended(*(torch.cat(each, 1) for each in zip(*found, strict=True))), penalty

    def keep(self, states: Tensor) -> ByHead:
        return self.change(lambda memory: memory.keep(states))

    def change(self, how: Callable[[Any], Any]) -> ByHead:
        """The same parts with other memories."""
        return ByHead([HeadPart(mechanism, how(memory)) for mechanism, memory in self.parts])

    def bytes(self) -> int:
        return sum(part.memory.bytes() for part in self.parts)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{n}.{name}": t for n, part in enumerate(self.parts) for name, t in part.memory.tensors().items()}

    def with_tensors(self, tensors: dict[str, Tensor]) -> ByHead:
        numbers = itertools.count()
        return self.change(lambda memory: memory.with_tensors(pick(tensors, next(numbers))))


def pick(tensors: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """The tensors whose name begins with "n.", without this prefix."""
    found = ((name.partition("."), t) for name, t in tensors.items())
    return {name: t for (number, _, name), t in found if number == str(n)}
