"""Decoding: one query per batch row over rings of keys and values; each key/value head has a ring as long as it needs.

Shapes: B batch, H query heads, Hkv key/value heads, D and Dv head sizes; N slots in all, Σ of the heads' capacities
and sink slots.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import unserved_terms, unserved_transforms
from spanformer.ops.decode.banded import BandedDecode
from spanformer.ops.decode.held import Rings
from spanformer.ops.rule import UNLIMITED, Rule
from spanformer.ops.tables import ENDING, TABLES

if TYPE_CHECKING:
    from spanformer.ops.backends.triton.rings import TritonDecode


def attend_rings(
    q: Tensor, rings: Rings, rule: Rule, *, new: tuple[Tensor, Tensor] | None = None, backend: str = "auto",
    scale: float | None = None,
) -> Attended:  # fmt: skip
    """Attention of one query per row, q [B, H, 1, D], at each row's newest position.

    Takes the rule's reach, span ([H] or [B, H, 1]), sink_tokens, distance tables, sink_logits and paper_compat. Returns
    out [B, H, 1, Dv] and lse [B, H, 1]. No gradients: this is for decoding. new: keys and values [B, Hkv, 1, ·], which
    are written at the newest positions first. backend: "native" (without distance_value and distance_scale), "banded"
    (PyTorch, any device) or "auto". torch.compile and torch.export trace it as one operator.
    """
    _check_query(q, rings)
    _check_terms(q, rings, rule)
    _check_new(q, rings, new)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    with torch.no_grad():
        if torch.compiler.is_compiling() or type(q) is not Tensor or type(rings.keys) is not Tensor:
            from spanformer.ops.decode.operator import call_operator

            return Attended(*call_operator(q, rings, rule, new, backend, scale))
        _check_room(rings, rule, max(rings.newest.tolist(), default=-1) + 1)
        return _prepare(q, rings, rule, backend, scale).attend(q, new)


class Decoder:
    """`attend_rings` for many tokens: it checks and packs only once what stays the same from token to token.

    It reads rings.newest (and oldest) in every call, so their owner updates them in place.
    """

    def __init__(self, q: Tensor, rings: Rings, rule: Rule, *, backend: str = "auto", scale: float | None = None):
        """q: the first query."""
        _check_query(q, rings)
        _check_terms(q, rings, rule)
        _check_room(rings, rule, UNLIMITED)
        self._prepared = _prepare(q, rings, rule, backend, 1.0 / math.sqrt(q.shape[3]) if scale is None else scale)

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        """q [B, H, 1, D] of the first query's shape and dtype; new: the keys and values [B, Hkv, 1, ·] to write at
        the newest positions first. Call it without gradients."""
        return self._prepared.attend(q, new)


def _check_query(q: Tensor, rings: Rings) -> None:
    if q.ndim != 4 or q.shape[2] != 1 or not q.is_floating_point():
        raise ValueError(
            f"q has shape {list(q.shape)} and dtype {q.dtype}; "
            "rings take one query per row, [B, H, 1, D] of a floating-point dtype"
        )
    b, _, _, d = q.shape
    if rings.keys.device != q.device:
        raise ValueError(f"keys is on {rings.keys.device}; expected {q.device}, where q is")
    fits = rings.bits or rings.keys.dtype == q.dtype
    if rings.keys.shape[0] != b or rings.sizes[0] != d or not fits:
        raise ValueError(
            f"keys has shape {list(rings.keys.shape)} and dtype {rings.keys.dtype}; expected [{b}, N, {d}] of {q.dtype}"
        )


def _check_new(q: Tensor, rings: Rings, new: tuple[Tensor, Tensor] | None) -> None:
    stored = (("keys", rings.keys), ("values", rings.values))
    for (name, held), size, t in zip(stored, rings.sizes, new or (), strict=False):
        expected = [q.shape[0], len(rings.capacities), 1, size]
        if list(t.shape) != expected or t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"new {name} have shape {list(t.shape)} and dtype {t.dtype} on {t.device}; "
                f"expected {expected} of {q.dtype} on {q.device}"
            )
        if held.stride(2) != 1:
            raise ValueError(
                f"{name} has strides {list(held.stride())}; expected contiguous rows, because new ones are written to "
                "it"
            )


def _check_terms(q: Tensor, rings: Rings, rule: Rule) -> None:
    """Checks that need only shapes."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is of type {type(rule).__name__}; expected a Rule")
    b, h, _, d = q.shape
    if rule.heads != h or h % len(rings.capacities):
        heads = f"q has {h} heads, the rule {rule.heads} and the rings {len(rings.capacities)}"
        raise ValueError(f"{heads}; expected q's number in the rule, and a number of rings that divides it")
    if rule.sink_tokens != rings.sink_tokens:
        raise ValueError(
            f"sink_tokens is {rule.sink_tokens} in the rule and {rings.sink_tokens} in the rings; expected one number"
        )
    unknown = [name for name in ("key_bias", "documents", "blocks") if getattr(rule, name) is not None]
    unknown += [name for name, least in (("stride", 1), ("skip", 0)) if getattr(rule, name) != least]
    if unknown or not rule.causal:
        raise ValueError(f"rings do not take {', '.join([*unknown, *([] if rule.causal else ['causal=False'])])}")
    if new := _unserved(rule):
        raise ValueError("; ".join(new))
    for name in ("span", *TABLES, "sink_logits"):
        t = getattr(rule, name)
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected {q.device}, where q is")
    for name, size in (("distance_vec", d), ("distance_value", rings.sizes[1])):
        if (t := getattr(rule, name)) is not None and t.shape[2] != size:
            raise ValueError(f"{name} has shape {list(t.shape)}; expected head size {size} as its last axis")
    if rule.dynamic and rule.span is not None and rule.span.shape != (b, h, 1):
        raise ValueError(f"span has shape {list(rule.span.shape)}; expected [{h}] or [{b}, {h}, 1]")


def _check_room(rings: Rings, rule: Rule, seen: int) -> None:
    """Checks that read spans and reaches. seen: the largest number of positions."""
    limits, group, shift = rule.limits(), rule.heads // len(rings.capacities), 1 if rule.paper_compat else 0
    for head, limit in enumerate(limits):
        needed, held = min(limit + shift, seen), rings.capacities[head // group]
        if needed > held:
            many = "without end" if needed >= UNLIMITED else f"{needed} positions"
            raise ValueError(
                f"capacity of key/value head {head // group} is {held}, but head {head} reaches {many}; "
                "make the ring at least as long as the reach"
            )
    for name in ENDING:
        if (table := getattr(rule, name)) is not None and table.shape[1] < min(max(limits), seen):
            raise ValueError(
                f"{name} has shape {list(table.shape)}; heads here reach {min(max(limits), seen)} distances"
            )


_NATIVE = ("heads", "causal", "reach", "span", "ramp", "distance_bias", "distance_vec", "sink_logits", "sink_tokens",
           "paper_compat")  # fmt: skip
_KNOWN = (*_NATIVE, "key_bias", "documents", "blocks", "distance_value", "distance_scale")
_unserved = unserved_terms(Rule, "rings", _KNOWN)
_native_unserved = unserved_terms(Rule, "the native kernel", _NATIVE)


def _native_refuses(q: Tensor, rings: Rings, rule: Rule) -> list[str]:
    reasons = [*([problem] if (problem := kernel.problem()) else []), *_native_unserved(rule)]
    reasons += unserved_transforms("the native kernel")
    for name, t in (("keys", rings.keys), ("values", rings.values)):  # a copy would miss later writes
        if t.stride(2) != 1 or t.is_neg():
            reasons.append(f"{name} has strides {list(t.stride())}; the native kernel takes contiguous rows")
    if q.device.type != "cpu":
        reasons.append(f"q is on {q.device}; the native kernel runs on the CPU")
    if q.dtype not in kernel.DTYPES:
        reasons.append(f"q has dtype {q.dtype}; the native kernel takes float32 and bfloat16")
    size = max(q.shape[3], rings.sizes[1])
    if size > kernel.MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {kernel.MAX_HEAD_SIZE}")
    return reasons


def _prepare(q: Tensor, rings: Rings, rule: Rule, backend: str, scale: float) -> _Native | BandedDecode | TritonDecode:
    if backend not in ("auto", "native", "triton", "banded"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'native', 'triton' or 'banded'")
    if backend == "triton" or (backend == "auto" and q.device.type == "cuda"):
        from spanformer.ops.backends.triton.rings import TritonDecode, refuses_rings

        kind, reasons = TritonDecode, refuses_rings(q, rings, rule)
    else:
        kind, reasons = _Native, _native_refuses(q, rings, rule)
    if backend not in ("auto", "banded") and reasons:
        raise ValueError(f"backend {backend!r} cannot serve this call: {'; '.join(reasons)}")
    return (BandedDecode if backend == "banded" or reasons else kind)(q, rings, rule, scale)


class _Native:
    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        learned = (rule.span, rule.distance_bias, rule.distance_vec, None, rule.sink_logits)
        terms = kernel.Terms(*(None if t is None else kernel.as_float(t.detach()) for t in learned))
        assert isinstance(rings.capacity, Tensor)  # __post_init__ converted it
        oldest = None if rings.oldest is None else rings.oldest.contiguous()
        where = (rings.first, rings.capacity, rings.newest.contiguous(), oldest)
        self._span, self._dv = terms.span, rings.sizes[1]
        near = rings.recent
        self._near = None if near is None else _Native(q, near.rings, rule, scale)
        beside = None if near is None or self._near is None else (self._near._packed, near.tokens, near.since)
        self._packed = kernel.pack_decode(q.dtype, rings, where, rule, terms, scale, beside)
        self._alive = (rule, terms, where, rings, beside)  # keeps alive what the packed addresses point to

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        q, *fresh = (t if t.stride(3) == 1 and not t.is_neg() else kernel.as_laid(t) for t in (q, *(new or ())))
        return Attended(*kernel.run_decode(self._packed, q, tuple(fresh), self._span, self._dv))
