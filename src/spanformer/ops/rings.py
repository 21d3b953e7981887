"""Decoding: one query per batch row against rings of keys and values, each key/value head's as long as it needs.

Shapes: B batch, H query heads, Hkv key/value heads, D and Dv head sizes; N slots in all, Σ of the heads' capacities
and kept slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.backend import unserved_terms
from spanformer.ops.call import Attended
from spanformer.ops.rule import UNLIMITED, Rule
from spanformer.ops.tables import ENDING, TABLES


@dataclass(frozen=True, eq=False)
class Rings:
    """Keys and values of all heads in one allocation. Head g's key at position p lies in slot
    first[g] + p mod capacity[g]; older positions have been overwritten. The first `kept` positions lie in the `kept`
    slots before first[g] instead, and stay."""

    keys: Tensor
    """[B, N, D], in int8 with `scales`"""
    values: Tensor
    """[B, N, Dv]"""
    capacity: Tensor
    """[Hkv] int64 on the CPU: slots of each key/value head, one head after the other"""
    newest: Tensor
    """[B] int64 on the CPU: the position last written, where the query stands; −1 for an empty row"""
    kept: int = 0
    """how many first positions each head keeps beside its ring"""
    oldest: Tensor | None = None
    """[B, Hkv] int64 on the CPU: positions below are not held, though the ring would have room; None: all are"""
    scales: tuple[Tensor, Tensor] | None = None
    """[B, N] float32 each: what 8-bit keys and values are to be multiplied with"""
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
        for name, shape in (("capacity", (None,)), ("newest", (b,)), ("oldest", (b, len(self.capacity)))):
            _check_whole(name, getattr(self, name), shape)
        capacities, more = self.capacity.tolist(), f" with {self.kept} kept beside each" if self.kept else ""
        if not capacities or min(capacities) < 1 or self.kept < 0 or sum(capacities) + self.kept * len(capacities) != n:
            raise ValueError(f"capacity is {capacities}{more}; expected at least 1 slot a head, {n} in all as keys has")
        contiguous = self.capacity.contiguous()
        object.__setattr__(self, "capacity", contiguous)
        object.__setattr__(self, "first", (contiguous + self.kept).cumsum(0) - contiguous)
        object.__setattr__(self, "capacities", capacities)

    def _check_scales(self, b: int, n: int) -> None:
        if (self.scales is not None) != (self.keys.dtype == torch.int8):
            raise ValueError(f"keys has dtype {self.keys.dtype}; expected torch.int8 with scales, and without another")
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


def attend_rings(q: Tensor, rings: Rings, rule: Rule, *, backend: str = "auto", scale: float | None = None) -> Attended:
    """Attention of one query per row, q [B, H, 1, D], standing at each row's newest position.

    Takes the rule's reach, span ([H] or [B, H, 1]), kept, distance tables, sinks and original. Returns
    out [B, H, 1, Dv] and lse [B, H, 1]. No gradients: this is for decoding. backend: "native" (without distance_value
    and distance_scale), "banded" (PyTorch, any device) or "auto".
    """
    _check_query(q, rings)
    _check_rule(q, rings, rule, max(rings.newest.tolist(), default=-1) + 1)
    with torch.no_grad():
        return _prepare(q, rings, rule, backend, scale).attend(q)


class Decoder:
    """`attend_rings` prepared for many tokens: what stays the same from one to the next is checked and packed once.

    Reads rings.newest (and oldest) anew each time, so whoever owns the rings moves them on in place.
    """

    def __init__(self, q: Tensor, rings: Rings, rule: Rule, *, backend: str = "auto", scale: float | None = None):
        """q: the first query."""
        _check_query(q, rings)
        _check_rule(q, rings, rule, UNLIMITED)
        self._prepared = _prepare(q, rings, rule, backend, scale)

    @property
    def writes(self) -> bool:
        """Whether `attend` takes new keys and values and writes them itself."""
        return isinstance(self._prepared, _Native)

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        """q [B, H, 1, D] of the first query's shape and dtype; new: the keys and values [B, Hkv, 1, ·] to be written at
        the newest positions first, where it `writes`. To be called without gradients."""
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


def _check_rule(q: Tensor, rings: Rings, rule: Rule, seen: int) -> None:
    """seen: how many positions there are at most."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is of type {type(rule).__name__}; expected a Rule")
    b, h, _, d = q.shape
    if rule.heads != h or h % len(rings.capacities):
        heads = f"q has {h} heads, the rule {rule.heads} and the rings {len(rings.capacities)}"
        raise ValueError(f"{heads}; expected q's in the rule, and a number of rings that divides it")
    if rule.kept != rings.kept:
        raise ValueError(f"the rule keeps {rule.kept} first tokens and the rings {rings.kept}; expected one number")
    unknown = [name for name in ("key_bias", "documents", "blocks", "also") if getattr(rule, name) is not None]
    unknown += [name for name, least in (("stride", 1), ("skip", 0)) if getattr(rule, name) != least]
    if unknown or not rule.causal:
        raise ValueError(f"rings do not take {', '.join([*unknown, *([] if rule.causal else ['causal=False'])])}")
    if new := _unserved(rule):
        raise ValueError("; ".join(new))
    for name in ("span", *TABLES, "sinks"):
        t = getattr(rule, name)
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected {q.device}, where q is")
    for name, size in (("distance_vec", d), ("distance_value", rings.values.shape[2])):
        if (t := getattr(rule, name)) is not None and t.shape[2] != size:
            raise ValueError(f"{name} has shape {list(t.shape)}; expected head size {size} as its last axis")
    if rule.dynamic and rule.span is not None and rule.span.shape != (b, h, 1):
        raise ValueError(f"span has shape {list(rule.span.shape)}; expected [{h}] or [{b}, {h}, 1]")
    limits, group, shift = rule.limits(), h // len(rings.capacities), 1 if rule.original else 0
    for head, limit in enumerate(limits):
        needed, held = min(limit + shift, seen), rings.capacities[head // group]
        if needed > held:
            many = "without end" if needed >= UNLIMITED else f"{needed} positions"
            raise ValueError(
                f"capacity of key/value head {head // group} is {held}, but head {head} reaches {many}; "
                "make the ring as long as the reach"
            )
    for name in ENDING:
        if (table := getattr(rule, name)) is not None and table.shape[1] < min(max(limits), seen):
            raise ValueError(
                f"{name} has shape {list(table.shape)}; heads here reach {min(max(limits), seen)} distances"
            )


_unserved = unserved_terms("rings", "kept", "distance_value", "distance_scale")
_native_unserved = unserved_terms("the native kernel", "kept")


def _native_refuses(q: Tensor, rings: Rings, rule: Rule) -> list[str]:
    reasons = [*([problem] if (problem := kernel.problem()) else []), *_native_unserved(rule)]
    if q.device.type != "cpu":
        reasons.append(f"q is on {q.device}; the native kernel runs on the CPU")
    if q.dtype not in kernel.DTYPES:
        reasons.append(f"q has dtype {q.dtype}; the native kernel takes float32 and bfloat16")
    size = max(q.shape[3], rings.values.shape[2])
    if size > kernel.MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {kernel.MAX_HEAD_SIZE}")
    return reasons


def _prepare(q: Tensor, rings: Rings, rule: Rule, backend: str, scale: float | None) -> _Native | _Banded:
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    reasons = _native_refuses(q, rings, rule)
    if backend == "native" and reasons:
        raise ValueError(f"backend 'native' cannot serve this call: {'; '.join(reasons)}")
    if backend not in ("auto", "native", "banded"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'native' or 'banded'")
    prepared = _Banded if backend == "banded" or reasons else _Native
    return prepared(q, rings, rule, scale)


class _Native:
    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        learned = (rule.span, rule.distance_bias, rule.distance_vec, None, rule.sinks)
        terms = kernel.Terms(*(None if t is None else kernel.as_float(t.detach()) for t in learned))
        keys, values = (t if t.stride(2) == 1 else t.contiguous() for t in (rings.keys, rings.values))
        where = (rings.first, rings.capacity, rings.newest.contiguous(), rings.oldest)
        if rings.oldest is not None:
            where = (*where[:3], rings.oldest.contiguous())
        self._span, self._dv = terms.span, values.shape[2]
        self._packed = kernel.pack_decode(
            q.dtype, rule.heads, keys, values, rings.scales, where, rings.kept, rule, terms, scale
        )
        self._alive = (rule, terms, keys, values, where, rings)  # what the packed addresses point to

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        q, *fresh = (t if t.stride(3) == 1 else t.contiguous() for t in (q, *(new or ())))
        return Attended(*kernel.run_decode(self._packed, q, tuple(fresh), self._span, self._dv))


class _Banded:
    """The same in PyTorch, head by head over the slots the head can see."""

    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        self.rings, self.rule, self.scale, self.limits = rings, rule, scale, rule.limits()

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        assert new is None, "whoever owns the rings writes them"
        found = [self._head(q[:, head, 0], head) for head in range(q.shape[1])]
        outs, lses = zip(*found, strict=True)
        return Attended(torch.stack(outs, 1)[:, :, None], torch.stack(lses, 1)[:, :, None])

    def _head(self, q: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """q [B, D] → [B, Dv] and [B]"""
        rings, rule = self.rings, self.rule
        b, exact = len(q), torch.float64 if q.dtype == torch.float64 else torch.float32
        g, shift = head // (rule.heads // len(rings.capacities)), 1 if rule.original else 0
        capacity, first = rings.capacities[g], int(rings.first[g])
        seen = min(self.limits[head], capacity - shift, max(rings.newest.tolist(), default=-1) + 1 - shift)
        newest, d = rings.newest.to(q.device)[:, None], torch.arange(max(0, seen), device=q.device)
        position = newest - shift - d  # [B, seen]
        oldest = rings.kept if rings.oldest is None else rings.oldest[:, g, None].clamp(min=rings.kept).to(q.device)
        visible, soft = position >= oldest, torch.zeros((b, len(d)), dtype=exact, device=q.device)
        if rule.span is not None:
            z = rule.span[:, head] if rule.dynamic else rule.span[head].expand(b, 1)  # [B, 1]
            m = ((rule.ramp + z.to(exact) - d) / rule.ramp).clamp(0, 1)
            visible = visible & (m > 0)
            soft = torch.where(visible, m, 1).log()
        if rule.distance_bias is not None:
            soft = soft + rule.distance_bias[head, : len(d)].to(exact)
        early = torch.arange(rings.kept, device=q.device).expand(b, -1)  # kept ones stand apart from all that
        slot = first + torch.cat([position % capacity, early - rings.kept], 1)  # [B, seen + kept]
        visible = torch.cat([visible, early <= newest - shift], 1)
        soft = torch.cat([soft, soft.new_zeros(early.shape)], 1)
        keys, values = (rows_at(rings, kind, slot, exact) for kind in (0, 1))
        score = self._by_distance((keys @ q.to(exact)[..., None])[..., 0] * self.scale, q.to(exact), head, len(d))
        score = torch.where(visible, score + soft, -math.inf)
        if rule.sinks is not None:
            score = torch.cat([score, rule.sinks[head].to(exact).expand(b, 1)], 1)
        lse = score.logsumexp(1) if score.shape[1] else score.new_full((b,), -math.inf)
        weight = torch.where(lse[:, None] == -math.inf, 0, (score - lse[:, None]).exp())[:, : slot.shape[1]]
        values = torch.where(visible[..., None], values, 0)  # an unwritten slot may hold anything
        out = (weight[:, None] @ values)[:, 0]
        if rule.distance_value is not None:
            table = rule.distance_value[head % rule.distance_value.shape[0]].to(exact)
            out = out + weight[:, : len(d)] @ table[d.clamp(max=len(table) - 1)]
        return out.to(q.dtype), lse

    def _by_distance(self, products: Tensor, q: Tensor, head: int, seen: int) -> Tensor:
        """What q·r[d] adds to the products [B, seen + kept], and distance_scale makes of them."""
        rule = self.rule
        near, early = products[:, :seen], products[:, seen:]
        if rule.distance_vec is not None:
            table = rule.distance_vec[head % rule.distance_vec.shape[0], :seen]
            near = near + self.scale * (q @ table.to(q.dtype).T)
        if rule.distance_scale is not None:
            near = near.relu() * rule.distance_scale[head, :seen].to(q.dtype)
        return torch.cat([near, early], 1)


def rows_at(rings: Rings, kind: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys (kind 0) or values (1) in slots [B, n] as numbers: [B, n, D or Dv]."""
    kept = (rings.keys, rings.values)[kind]
    rows = kept.gather(1, slots[..., None].expand(-1, -1, kept.shape[2])).to(dtype)
    return rows if rings.scales is None else rows * rings.scales[kind].gather(1, slots)[..., None].to(dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] in 8 bits: codes [..., D] int8 and one scale [...] in float32 for each row, the nearest multiples of
    max |x| / 127; so no number is off by more than max |x| / 254 (and float32's rounding)."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    coded = scale >= torch.finfo(torch.float32).tiny  # NaN is not
    codes = torch.where(coded[..., None] & (scale < math.inf)[..., None], (wide / scale[..., None]).round(), 0)
    return codes.to(torch.int8), torch.where(scale.isfinite(), scale, math.nan)
