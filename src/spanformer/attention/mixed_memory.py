"""Heads of one layer with different memories, such as keys and values for some, a recurrent state for others.

out = [out_1, …, out_H]        head h uses the mechanism and the memory of its part
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from spanformer.attention.base import Attention, remembers_itself
from spanformer.attention.mixed import Mixed
from spanformer.attention.parts import Parts
from spanformer.memory.base import ByHead, HeadPart, MemoryShape

M = TypeVar("M")


def mix(parts: Sequence[Attention]) -> Attention:
    """One mechanism for the heads of all parts, in this order."""
    if len(parts) == 1:
        return parts[0]
    groups: list[list[Attention]] = []
    for part in parts:
        joins = groups and not remembers_itself(part) and not remembers_itself(groups[-1][-1])
        groups[-1].append(part) if joins else groups.append([part])
    made = [group[0] if len(group) == 1 else Mixed(group) for group in groups]
    return made[0] if len(made) == 1 else MixedMemory(made)


def new_memory(mechanism: Attention, shape: MemoryShape, usual: Callable[[Attention, MemoryShape], M]) -> M | ByHead:
    """An empty memory for a layer's mechanism. usual: makes the memory of mechanisms without their own."""
    if not isinstance(mechanism, MixedMemory):
        own = mechanism.new_memory(shape)
        return usual(mechanism, shape) if own is None else own  # pyright: ignore[reportReturnType]
    shared, parts = mechanism.heads // shape.kv_heads, []
    for part in mechanism.each():
        if part.heads % shared:
            raise ValueError(
                f"{type(part).__name__} has {part.heads} heads, and {shared} query heads share a key/value head; heads "
                f"with different memories cannot share one, so expected a multiple of {shared}"
            )
        some = replace(shape, kv_heads=part.heads // shared)
        parts.append(HeadPart(part, new_memory(part, some, usual)))
    return ByHead(parts)


class MixedMemory(Parts):
    """Parts with different memories. It has no rule: a layer's memory (`ByHead`) calls each part."""
