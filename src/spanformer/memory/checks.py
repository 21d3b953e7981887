"""What a layer's cache refuses, each in a sentence.

Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spanformer.ops import Rule


def check_reach(reach: Sequence[int]) -> list[int]:
    each = [int(n) for n in reach]
    if not each or min(each) < 1:
        raise ValueError(f"reach is {each}; expected at least 1 position for each key/value head")
    return each


def check_lengths(lengths: Tensor | None, batch: int, new: int) -> Tensor | None:
    """lengths [B] of rows with `new` tokens each, as int64 on the CPU."""
    if lengths is None:
        return None
    given = lengths.to("cpu", torch.int64)
    fits = given.shape == (batch,) and not (lengths.is_floating_point() or lengths.dtype == torch.bool)
    if not fits or bool(((given < 0) | (given > new)).any()):
        raise ValueError(f"lengths is {lengths.tolist()}; expected {batch} numbers of real tokens, 0 … {new}")
    return given


def check_call(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, batch: int, reach: list[int], dims: tuple[int, int], kept: int
) -> None:
    """q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] for a cache with these reaches [Hkv] and dims (D, Dv)."""
    if q.ndim != 4 or q.shape[1] != rule.heads or rule.heads % len(reach):
        raise ValueError(
            f"q has shape {list(q.shape)}, the rule {rule.heads} heads and the cache {len(reach)}; expected "
            "[B, H, T, D] with the rule's heads, and a number that divides them in the cache"
        )
    for name, t, size in (("k", k, dims[0]), ("v", v, dims[1])):
        if t.shape != (batch, len(reach), q.shape[2], size):
            raise ValueError(f"{name} has shape {list(t.shape)}; expected {[batch, len(reach), q.shape[2], size]}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"{name} has dtype {t.dtype} on {t.device}; expected {q.dtype} on {q.device}, as q has")
    for _, part in rule.parts():
        if part.kept != kept:
            raise ValueError(f"the rule keeps {part.kept} first tokens and the cache {kept}; expected one number")
        unknown = ("blocks", "key_bias", "key_span", "forget", "documents", "also")
        if any(getattr(part, name) is not None for name in unknown) or not part.causal:
            raise ValueError(f"a cache takes causal rules without {', '.join(unknown)}")
        if part.stride != 1 or part.skip != 0:
            raise ValueError("a cache takes rules without stride and skip")
    shared, shift = rule.heads // len(reach), 1 if rule.original else 0
    for head, limit in enumerate(rule.limits()):
        if limit + shift > reach[head // shared] and limit:
            raise ValueError(
                f"head {head} sees {limit + shift} positions and the cache holds {reach[head // shared]} for "
                "it; make it with this reach, or resize it"
            )
