"""Checks of the arguments of a layer's KV cache.

Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spanformer.ops import AnyRule, Rule


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


def check_in_sight(lost: Tensor, lengths: Tensor, seen: Tensor, why: str) -> None:
    """lost [B, Hkv] bool: whether a row that is cropped from seen [B] to lengths [B] tokens would see tokens that its
    ring no longer holds."""
    if bool(lost.any()):
        row = int(lost.nonzero()[0, 0])
        raise ValueError(f"row {row} cannot be cropped from {int(seen[row])} to {int(lengths[row])} tokens: {why}")


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AnyRule,
    batch: int,
    reach: list[int],
    dims: tuple[int, int],
    sink_tokens: int,
) -> None:
    """q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] for a KV cache with these reaches [Hkv] and dims (D,
    Dv)."""
    if q.ndim != 4 or q.shape[1] != rule.heads or rule.heads % len(reach):
        raise ValueError(
            f"q has shape {list(q.shape)}, the rule has {rule.heads} heads and the KV cache {len(reach)}; expected "
            "[B, H, T, D] with the rule's number of heads, and a number in the KV cache that divides it"
        )
    for name, t, size in (("k", k, dims[0]), ("v", v, dims[1])):
        if t.shape != (batch, len(reach), q.shape[2], size):
            raise ValueError(f"{name} has shape {list(t.shape)}; expected {[batch, len(reach), q.shape[2], size]}")
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(f"{name} has dtype {t.dtype} on {t.device}; expected {q.dtype} on {q.device}, as q has")
    for _, part in rule.parts():
        if not isinstance(part, Rule):
            raise ValueError(f"rule holds a {type(part).__name__}; a KV cache takes one Rule per head")
        if part.sink_tokens != sink_tokens:
            raise ValueError(
                f"sink_tokens is {part.sink_tokens} in the rule and {sink_tokens} in the KV cache; expected one number"
            )
        unknown = ("blocks", "key_bias", "key_span", "forget", "documents")
        if any(getattr(part, name) is not None for name in unknown) or not part.causal:
            raise ValueError(f"rule does not suit a KV cache; expected a causal one without {', '.join(unknown)}")
        if part.stride != 1 or part.skip != 0:
            raise ValueError("rule has a stride or skip; a KV cache takes rules without them")
    shared, shift = rule.heads // len(reach), 1 if rule.paper_compat else 0
    for head, limit in enumerate(rule.limits()):
        if limit + shift > reach[head // shared] and limit:
            raise ValueError(
                f"head {head} sees {limit + shift} positions and the KV cache holds {reach[head // shared]} for "
                "it; make the cache with this reach, or resize it"
            )


def check_lengths_back(lengths: Tensor, seen: Tensor) -> None:
    """Check that rows that have read seen [B] tokens can be cropped to lengths [B]."""
    if lengths.shape != seen.shape or lengths.is_floating_point():
        raise ValueError(f"lengths has shape {list(lengths.shape)}; expected whole numbers [{len(seen)}]")
    for row, (length, read) in enumerate(zip(lengths.tolist(), seen.tolist(), strict=True)):
        if not 0 <= length <= read:
            raise ValueError(
                f"row {row} has read {read} tokens; it cannot be cropped to {length}. Give a length within what it has "
                "read"
            )
