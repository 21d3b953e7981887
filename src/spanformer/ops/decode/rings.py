"""Decoding: one query per batch row over rings of keys and values; each key/value head has a ring as long as it needs.

Shapes: B batch, H query heads, Hkv key/value heads, D and Dv head sizes; N slots in all, Σ of the heads' capacities
and sink slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import unserved_terms, unserved_transforms
from spanformer.ops.decode.banded import BandedDecode
from spanformer.ops.rule import UNLIMITED, Rule
from spanformer.ops.tables import ENDING, TABLES


@dataclass(frozen=True, eq=False)
class Rings:
    """Keys and values of all heads in one allocation. Head g's key at position p lies in slot
    first[g] + p mod capacity[g]; older positions have been overwritten. The first `sink_tokens` positions are in the
    `sink_tokens` slots before first[g] instead, and are never overwritten."""

    keys: Tensor
    """[B, N, D], in int8 with `scales`"""
    values: Tensor
    """[B, N, Dv]"""
    capacity: Tensor | Sequence[int]
    """[Hkv] slots of each key/value head, one head after the other. Stored as int64 on the CPU; inside torch.compile
    and torch.export, give numbers."""
    newest: Tensor
    """[B] int64 on the CPU: the position written last, which is the query's; −1 for an empty row"""
    sink_tokens: int = 0
    """how many first positions each head keeps beside its ring"""
    oldest: Tensor | None = None
    """[B, Hkv] int64 on the CPU: positions below it are missing, though the ring has room for them; None: none are"""
    scales: tuple[Tensor, Tensor] | None = None
    """[B, N] float32 each: the factors of 8-bit keys and values"""
    first: Tensor = field(init=False)
    """[Hkv] int64 on the CPU: the first slot of each head's ring"""
    capacities: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.keys.ndim != 3 or self.values.ndim != 3 or self.values.shape[:2] != self.keys.shape[:2]:
            raise ValueError(
                f"keys and values have shapes {list(self.keys.shape)} and {list(self.values.shape)}; "
                "expected [B, N, D] and [B, N, Dv]"
            )
        if self.values.dtype != self.keys.dtype or self.values.device != self.keys.device:
            raise ValueError(
                f"values has dtype {self.values.dtype} on {self.values.device}; "
                f"expected {self.keys.dtype} on {self.keys.device}, as keys has"
            )
        b, n, _ = self.keys.shape
        self._check_scales(b, n)
        given, more = self.capacity, f" with {self.sink_tokens} sink tokens beside each" if self.sink_tokens else ""
        capacity = given if isinstance(given, Tensor) else torch.tensor(given)
        for name, t, shape in (
            ("capacity", capacity, (None,)),
            ("newest", self.newest, (b,)),
            ("oldest", self.oldest, (b, len(capacity))),
        ):
            _check_whole(name, t, shape)
        capacities = given.tolist() if isinstance(given, Tensor) else list(given)
        if (
            not capacities
            or min(capacities) < 1
            or self.sink_tokens < 0
            or sum(capacities) + self.sink_tokens * len(capacities) != n
        ):
            raise ValueError(
                f"capacity is {capacities}{more}; expected at least 1 slot per head and {n} in all, as keys has"
            )
        contiguous = capacity.contiguous()
        object.__setattr__(self, "capacity", contiguous)
        object.__setattr__(self, "first", (contiguous + self.sink_tokens).cumsum(0) - contiguous)
        object.__setattr__(self, "capacities", capacities)

    def _check_scales(self, b: int, n: int) -> None:
        if (self.scales is not None) != (self.keys.dtype == torch.int8):
            raise ValueError(
                f"keys has dtype {self.keys.dtype}; expected torch.int8 if scales are given, and another dtype if not"
            )
        for t in self.scales or ():
            if t.shape != (b, n) or t.dtype != torch.float32 or t.device != self.keys.device or not t.is_contiguous():
                raise ValueError(
                    f"scales has shape {list(t.shape)} and dtype {t.dtype} on {t.device}; "
                    f"expected contiguous float32 [{b}, {n}] on {self.keys.device}, for keys and for values"
                )


def _check_whole(name: str, t: Tensor | None, shape: tuple[int | None, ...]) -> None:
    if t is None:
        return
    fits = t.ndim == len(shape) and all(want in (None, got) for got, want in zip(t.shape, shape, strict=True))
    if t.dtype != torch.int64 or t.device.type != "cpu" or not fits:
        expected = f"int64 [{', '.join(str(n or 'Hkv') if n is None else str(n) for n in shape)}] on the CPU"
        raise ValueError(f"{name} has shape {list(t.shape)} and dtype {t.dtype} on {t.device}; expected {expected}")


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
    dtypes = (torch.int8 if rings.scales else q.dtype), q.dtype
    if rings.keys.shape[0] != b or rings.keys.shape[2] != d or rings.keys.dtype not in dtypes:
        raise ValueError(
            f"keys has shape {list(rings.keys.shape)} and dtype {rings.keys.dtype}; expected [{b}, N, {d}] of {q.dtype}"
        )


def _check_new(q: Tensor, rings: Rings, new: tuple[Tensor, Tensor] | None) -> None:
    for name, held, t in zip(("keys", "values"), (rings.keys, rings.values), new or (), strict=False):
        expected = [q.shape[0], len(rings.capacities), 1, held.shape[2]]
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
    for name, size in (("distance_vec", d), ("distance_value", rings.values.shape[2])):
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
    size = max(q.shape[3], rings.values.shape[2])
    if size > kernel.MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {kernel.MAX_HEAD_SIZE}")
    return reasons


def _prepare(q: Tensor, rings: Rings, rule: Rule, backend: str, scale: float) -> _Native | BandedDecode:
    reasons = _native_refuses(q, rings, rule)
    if backend == "native" and reasons:
        raise ValueError(f"backend 'native' cannot serve this call: {'; '.join(reasons)}")
    if backend not in ("auto", "native", "banded"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'native' or 'banded'")
    prepared = BandedDecode if backend == "banded" or reasons else _Native
    return prepared(q, rings, rule, scale)


class _Native:
    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        learned = (rule.span, rule.distance_bias, rule.distance_vec, None, rule.sink_logits)
        terms = kernel.Terms(*(None if t is None else kernel.as_float(t.detach()) for t in learned))
        keys, values = rings.keys, rings.values
        assert isinstance(rings.capacity, Tensor)  # __post_init__ converted it
        oldest = None if rings.oldest is None else rings.oldest.contiguous()
        where = (rings.first, rings.capacity, rings.newest.contiguous(), oldest)
        self._span, self._dv = terms.span, values.shape[2]
        self._packed = kernel.pack_decode(
            q.dtype, rule.heads, keys, values, rings.scales, where, rings.sink_tokens, rule, terms, scale
        )
        self._alive = (rule, terms, keys, values, where, rings)  # keeps alive what the packed addresses point to

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        q, *fresh = (t if t.stride(3) == 1 and not t.is_neg() else kernel.as_laid(t) for t in (q, *(new or ())))
        return Attended(*kernel.run_decode(self._packed, q, tuple(fresh), self._span, self._dv))
