"""Decoding as torch operators, for torch.compile and torch.export: `attend_rings` reads rings, and `decode` writes new
keys and values to them first, as its schema declares.

An operator takes tensors and numbers. Its implementation rebuilds `Rings` and a `Rule` from them, on real tensors, so
that every call in a graph is checked like an eager one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spanformer.ops.decode.rings import Rings, attend_rings
from spanformer.ops.rule import Rule

_RINGS = "Tensor{} keys, Tensor{} values, Tensor{}? key_scales, Tensor{}? value_scales"
_REST = (
    "int[] capacity, Tensor newest, int sink_tokens, Tensor? oldest, int[] sizes, "
    "bool paper_compat, float ramp, Tensor? reach, Tensor? span, Tensor? distance_bias, Tensor? distance_vec, "
    "Tensor? distance_value, Tensor? distance_scale, Tensor? sink_logits, str backend, float scale"
)
_TERMS = ("reach", "span", "distance_bias", "distance_vec", "distance_value", "distance_scale", "sink_logits")
SIZES = 8
"""the place of `sizes` among the arguments after q"""
_NEW = "Tensor new_keys, Tensor new_values"
torch.library.define("spanformer::attend_rings", f"(Tensor q, {_RINGS.format(*[''] * 4)}, {_REST}) -> (Tensor, Tensor)")
torch.library.define(
    "spanformer::decode",
    f"(Tensor q, {_NEW}, {_RINGS.format('(a!)', '(b!)', '(c!)', '(d!)')}, {_REST}) -> (Tensor, Tensor)",
)


def call_operator(
    q: Tensor, rings: Rings, rule: Rule, new: tuple[Tensor, Tensor] | None, backend: str, scale: float
) -> tuple[Tensor, Tensor]:
    operator = torch.ops.spanformer.attend_rings if new is None else torch.ops.spanformer.decode
    return operator(q, *(new or ()), *arguments(rings, rule), backend, float(scale))


def arguments(rings: Rings, rule: Rule) -> tuple[Tensor | Sequence[int] | float | None, ...]:
    """Rings and rule in the order of the schemas."""
    if rings.recent is not None:
        raise ValueError(
            "bits is 4, and torch.compile and torch.export do not take a KV cache that also holds its newest tokens in "
            "8 bits; decode without them, or use bits=8"
        )
    held = rings.keys, rings.values, *(rings.scales or (None, None))
    where = rings.capacities, rings.newest, rings.sink_tokens, rings.oldest, list(rings.sizes)
    return *held, *where, rule.paper_compat, float(rule.ramp), *(getattr(rule, name) for name in _TERMS)


@torch.library.impl("spanformer::attend_rings", "default")
def _attend_rings(q, *rest):
    return _run(q, None, *rest)


@torch.library.impl("spanformer::decode", "default")
def _decode(q, new_keys, new_values, *rest):
    return _run(q, (new_keys, new_values), *rest)


def _run(
    q, new, keys, values, key_scales, value_scales, capacity, newest, sink_tokens, oldest, sizes, paper_compat, ramp,
    *rest,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *terms, backend, scale = rest
    scales = None if key_scales is None else (key_scales, value_scales)
    rings = Rings(keys, values, capacity, newest, sink_tokens, oldest, scales, tuple(sizes))
    rule = Rule(
        q.shape[1],
        sink_tokens=sink_tokens,
        paper_compat=paper_compat,
        ramp=ramp,
        **dict(zip(_TERMS, terms, strict=True)),
    )
    return attend_rings(q, rings, rule, new=new, backend=backend, scale=scale)


@torch.library.register_fake("spanformer::attend_rings")
def _attend_rings_fake(q, *rest):
    b, h, _, _ = q.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    sizes = rest[SIZES]
    return q.new_empty((b, h, 1, sizes[1])), q.new_empty((b, h, 1), dtype=exact)


@torch.library.register_fake("spanformer::decode")
def _decode_fake(q, _new_keys, _new_values, *rest):
    return _attend_rings_fake(q, *rest)
