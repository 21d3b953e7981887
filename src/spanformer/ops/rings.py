"""Decoding: one query per batch row against rings of keys and values, each key/value head's as long as it needs.

Shapes: B batch, H query heads, Hkv key/value heads, D and Dv head sizes; N slots in all, Σ of the heads' capacities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.call import Attended
from spanformer.ops.rule import Rule


@dataclass(frozen=True, eq=False)
class Rings:
    """Keys and values of all heads in one allocation. Head g's key at position p lies in slot
    first[g] + p mod capacity[g]; older positions have been overwritten."""

    keys: Tensor
    """[B, N, D]"""
    values: Tensor
    """[B, N, Dv]"""
    capacity: Tensor
    """[Hkv] int64 on the CPU: slots of each key/value head, one head after the other"""
    newest: Tensor
    """[B] int64 on the CPU: the position last written, where the query stands; −1 for an empty row"""
    first: Tensor = field(init=False)
    """[Hkv] int64 on the CPU: each head's first slot"""
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
        for name, length in (("capacity", None), ("newest", b)):
            t = getattr(self, name)
            if t.dtype != torch.int64 or t.device.type != "cpu" or t.ndim != 1 or t.shape[0] != (length or t.shape[0]):
                expected = f"int64 [{length or 'Hkv'}] on the CPU"
                raise ValueError(
                    f"{name} has shape {list(t.shape)} and dtype {t.dtype} on {t.device}; expected {expected}"
                )
        capacities = self.capacity.tolist()
        if not capacities or min(capacities) < 1 or sum(capacities) != n:
            raise ValueError(f"capacity is {capacities}; expected at least 1 slot a head, {n} in all as keys has")
        object.__setattr__(self, "capacity", self.capacity.contiguous())
        object.__setattr__(self, "first", self.capacity.cumsum(0) - self.capacity)
        object.__setattr__(self, "capacities", capacities)


def attend_rings(q: Tensor, rings: Rings, rule: Rule, *, backend: str = "auto", scale: float | None = None) -> Attended:
    """Attention of one query per row, q [B, H, 1, D], standing at each row's newest position.

    Takes the rule's reach, span ([H] or [B, H, 1]), distance_bias, distance_vec, sinks and original. Returns
    out [B, H, 1, Dv] and lse [B, H, 1]. No gradients: this is for decoding. backend: "native", "banded" (PyTorch, any
    device) or "auto".
    """
    _check(q, rings, rule)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    reasons = _native_refuses(q, rings)
    if backend == "native" and reasons:
        raise ValueError(f"backend 'native' cannot serve this call: {'; '.join(reasons)}")
    if backend not in ("auto", "native", "banded"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'native' or 'banded'")
    with torch.no_grad():
        if backend == "native" or (backend == "auto" and not reasons):
            return _native(q, rings, rule, scale)
        return _banded(q, rings, rule, scale)


def _check(q: Tensor, rings: Rings, rule: Rule) -> None:
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is of type {type(rule).__name__}; expected a Rule")
    if q.ndim != 4 or q.shape[2] != 1 or not q.is_floating_point():
        raise ValueError(
            f"q has shape {list(q.shape)} and dtype {q.dtype}; "
            "rings take one query per row, [B, H, 1, D] of a floating-point dtype"
        )
    b, h, _, d = q.shape
    if rings.keys.device != q.device:
        raise ValueError(f"keys is on {rings.keys.device}; expected {q.device}, where q is")
    if rings.keys.shape[0] != b or rings.keys.shape[2] != d or rings.keys.dtype != q.dtype:
        raise ValueError(
            f"keys has shape {list(rings.keys.shape)} and dtype {rings.keys.dtype}; expected [{b}, N, {d}] of {q.dtype}"
        )
    if rule.heads != h or h % len(rings.capacities):
        heads = f"q has {h} heads, the rule {rule.heads} and the rings {len(rings.capacities)}"
        raise ValueError(f"{heads}; expected q's in the rule, and a number of rings that divides it")
    unknown = [name for name in ("key_bias", "documents", "blocks") if getattr(rule, name) is not None]
    if unknown or not rule.causal:
        raise ValueError(f"rings do not take {', '.join([*unknown, *([] if rule.causal else ['causal=False'])])}")
    for name in ("span", "distance_bias", "distance_vec", "sinks"):
        t = getattr(rule, name)
        if t is not None and t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; expected {q.device}, where q is")
    if rule.distance_vec is not None and rule.distance_vec.shape[2] != d:
        raise ValueError(
            f"distance_vec has shape {list(rule.distance_vec.shape)}; expected head size {d} as its last axis"
        )
    if rule.dynamic and rule.span is not None and rule.span.shape != (b, h, 1):
        raise ValueError(f"span has shape {list(rule.span.shape)}; expected [{h}] or [{b}, {h}, 1]")
    limits, seen = rule.limits(), max(rings.newest.tolist(), default=-1) + 1
    group, shift = h // len(rings.capacities), 1 if rule.original else 0
    for head, limit in enumerate(limits):
        needed, held = min(limit + shift, seen), rings.capacities[head // group]
        if needed > held:
            raise ValueError(
                f"capacity of key/value head {head // group} is {held}, but head {head} reaches {needed} positions; "
                "make the ring as long as the reach"
            )
    for name, table in (("distance_bias", rule.distance_bias), ("distance_vec", rule.distance_vec)):
        if table is not None and table.shape[1] < min(max(limits), seen):
            raise ValueError(
                f"{name} has shape {list(table.shape)}; heads here reach {min(max(limits), seen)} distances"
            )


def _native_refuses(q: Tensor, rings: Rings) -> list[str]:
    reasons = [problem] if (problem := kernel.problem()) else []
    if q.device.type != "cpu":
        reasons.append(f"q is on {q.device}; the native kernel runs on the CPU")
    if q.dtype not in kernel.DTYPES:
        reasons.append(f"q has dtype {q.dtype}; the native kernel takes float32 and bfloat16")
    size = max(q.shape[3], rings.values.shape[2])
    if size > kernel.MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {kernel.MAX_HEAD_SIZE}")
    return reasons


def _native(q: Tensor, rings: Rings, rule: Rule, scale: float) -> Attended:
    q = q if q.stride(3) == 1 else q.contiguous()
    terms = kernel.Terms(*map(kernel.as_float, (rule.span, rule.distance_bias, rule.distance_vec, None, rule.sinks)))
    where = (rings.first, rings.capacity, rings.newest.contiguous())
    return Attended(*kernel.run_decode(q, rings.keys, rings.values, where, rule, terms, scale))


def _banded(q: Tensor, rings: Rings, rule: Rule, scale: float) -> Attended:
    """The same in PyTorch, head by head over the slots the head can see."""
    b, h, _, _ = q.shape
    group, limits, shift = h // len(rings.capacities), rule.limits(), 1 if rule.original else 0
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    outs, lses = [], []
    newest, first = rings.newest.to(q.device), rings.first.tolist()
    for head, limit in enumerate(limits):
        g = head // group
        capacity = rings.capacities[g]
        seen = max(0, min(limit, capacity - shift, max(rings.newest.tolist(), default=-1) + 1 - shift))
        d = torch.arange(seen, device=q.device)
        position = newest[:, None] - shift - d  # [B, seen]
        slot = first[g] + position % capacity
        at = slot[..., None].expand(-1, -1, q.shape[3])
        query = q[:, head, 0].to(exact)  # [B, D]
        score = (rings.keys.gather(1, at).to(exact) @ query[..., None])[..., 0]
        if rule.distance_vec is not None:
            score = score + query @ rule.distance_vec[head % rule.distance_vec.shape[0], :seen].to(exact).T
        score = score * scale
        if rule.distance_bias is not None:
            score = score + rule.distance_bias[head, :seen].to(exact)
        visible = position >= 0
        if rule.span is not None:
            z = rule.span[:, head] if rule.dynamic else rule.span[head].expand(b, 1)  # [B, 1]
            m = ((rule.ramp + z.to(exact) - d) / rule.ramp).clamp(0, 1)
            visible = visible & (m > 0)
            score = score + torch.where(visible, m, 1).log()
        score = torch.where(visible, score, -math.inf)
        if rule.sinks is not None:
            score = torch.cat([score, rule.sinks[head].to(exact).expand(b, 1)], 1)
        lse = score.logsumexp(1) if score.shape[1] else score.new_full((b,), -math.inf)
        weight = torch.where(lse[:, None] == -math.inf, 0, (score - lse[:, None]).exp())[:, :seen]
        at = slot[..., None].expand(-1, -1, rings.values.shape[2])
        value = torch.where(visible[..., None], rings.values.gather(1, at), 0)  # an unwritten slot may hold anything
        outs.append((weight[:, None] @ value.to(exact))[:, 0].to(q.dtype))
        lses.append(lse)
    return Attended(torch.stack(outs, 1)[:, :, None], torch.stack(lses, 1)[:, :, None])
