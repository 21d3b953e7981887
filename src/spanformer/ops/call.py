"""One attention call, checked and put in one form, as every backend receives it.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes of keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.blocks import BlockIndex
from spanformer.ops.rule import KEY_TERMS, UNLIMITED, Rule
from spanformer.ops.tables import ENDING, TABLES

FARTHEST = UNLIMITED // 2 - 1
"""the position that is farthest from 0: the distance of any two is below UNLIMITED"""


class Attended(NamedTuple):
    """out [B, H, Tq, Dv] and lse [B, H, Tq], the natural log of the softmax's sum (−inf for a row that saw nothing).
    Both are differentiable, so attention over disjoint keys can be merged by lse."""

    out: Tensor
    lse: Tensor


class Numbers(NamedTuple):
    """What dropout knows heads, queries and keys by. A call that was made of another one carries the other's numbers,
    and so drops the same weights."""

    heads: Tensor
    """[B, H] int64: b·H + h unless given"""
    queries: Tensor
    """[1 or B, Tq] int64"""
    keys: Tensor
    """[1 or B, Tk] int64"""


@dataclass(frozen=True, eq=False)
class Call:
    q: Tensor
    """[B, H, Tq, D]"""
    k: Tensor
    """[B, Hkv, Tk, D]"""
    v: Tensor
    """[B, Hkv, Tk, Dv]"""
    rule: Rule
    scale: float
    """multiplies q·k and q·r[d]"""
    dropout: float = 0.0
    seed: Tensor | None = None
    """[1] int64 when dropout > 0"""
    q_positions: Tensor | None = None
    """[1 or B, Tq] int64; None together with k_positions: keys are at 0 … Tk − 1, queries the last Tq of them"""
    k_positions: Tensor | None = None
    """[1 or B, Tk] int64"""
    q_documents: Tensor | None = None
    """[1 or B, Tq] int64, with k_documents"""
    k_documents: Tensor | None = None
    """[1 or B, Tk] int64"""
    numbers: Numbers | None = None
    """None: all count from 0"""

    @property
    def offset(self) -> int:
        """Implicit positions: query i stands at i + offset, key j at j."""
        return self.k.shape[2] - self.q.shape[2]

    @property
    def shift(self) -> int:
        """How many tokens every distance is shortened by (the original counts from the previous token)."""
        return 1 if self.rule.original else 0

    def positions(self) -> tuple[Tensor, Tensor]:
        """[1 or B, Tq] and [1 or B, Tk], made explicit."""
        if self.q_positions is not None and self.k_positions is not None:
            return self.q_positions, self.k_positions
        keys = torch.arange(self.k.shape[2], device=self.k.device)[None]
        return torch.arange(self.q.shape[2], device=self.q.device)[None] + self.offset, keys

    def ids(self) -> list[Tensor]:
        """The tensors it was given that have no gradient."""
        given = (self.q_positions, self.k_positions, self.q_documents, self.k_documents)
        pattern = () if self.rule.blocks is None else self.rule.blocks.tensors()
        return [t for t in (*given, *pattern) if t is not None]

    def numbered(self) -> Numbers:
        """The numbers for dropout, made explicit."""
        if self.numbers is not None:
            return self.numbers
        (b, h, tq, _), tk, at = self.q.shape, self.k.shape[2], self.q.device
        heads = torch.arange(b * h, device=at).view(b, h)
        return Numbers(heads, torch.arange(tq, device=at)[None], torch.arange(tk, device=at)[None])


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Call:
    """Check every argument against the others; raise a ValueError naming the one that does not fit."""
    _check_qkv(q, k, v, rule)
    b, _, tq, _ = q.shape
    tk = k.shape[2]
    if (q_positions is None) != (k_positions is None):
        given, missing = ("q_positions", "k_positions") if k_positions is None else ("k_positions", "q_positions")
        raise ValueError(f"{given} was given without {missing}; distances need both, or neither")
    if q_positions is not None and k_positions is not None:
        q_positions, k_positions = (
            _positions("q_positions", q_positions, b, tq, q),
            _positions("k_positions", k_positions, b, tk, q),
        )
    elif rule.causal and tk < tq:
        raise ValueError(
            f"k has {tk} keys for {tq} queries; a causal rule takes queries as the last positions of the keys, so it "
            "needs at least as many keys (or pass q_positions and k_positions)"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; expected 0 ≤ dropout < 1")
    q_documents, k_documents = _documents(rule, q, b, tq, tk)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    call = Call(q, k, v, rule, scale, dropout, seed, q_positions, k_positions, q_documents, k_documents)
    if rule.also is None:
        _check_rule(call)
        return call
    _check_rule(replace(call, rule=replace(rule, also=None)))
    make_call(
        q, k, v, rule.also, scale=scale, dropout=dropout, seed=seed, q_positions=q_positions, k_positions=k_positions
    )
    return call


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> None:
    if not isinstance(rule, Rule):
        raise ValueError(f"rule is of type {type(rule).__name__}; expected a Rule, as AdaptiveSpan.rule() gives")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is of type {type(t).__name__}; expected a tensor")
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {list(t.shape)}; expected 4 axes, [batch, heads, tokens, head size]")
        if not t.is_floating_point():
            raise ValueError(f"{name} has dtype {t.dtype}; expected a floating-point dtype")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; expected one dtype")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; expected one device")
    b, h, _, d = q.shape
    if rule.heads != h:
        raise ValueError(f"q has shape {list(q.shape)}, {h} heads; expected {rule.heads}, as the rule has")
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"k has shape {list(k.shape)}; expected [{b}, Hkv, Tk, {d}] to go with q {list(q.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {list(v.shape)}; expected {list(k.shape[:3])} and a head size, to go with k")
    if k.shape[1] < 1 or h % k.shape[1]:
        raise ValueError(
            f"k has shape {list(k.shape)}, {k.shape[1]} heads; expected a number of heads that divides q's {h}"
        )
    if d < 1 or v.shape[3] < 1:
        raise ValueError(f"q has head size {d} and v {v.shape[3]}; expected at least 1")


def _ids(name: str, ids: Tensor, batch: int, length: int, q: Tensor) -> Tensor:
    """Integer ids as [1 or B, length] int64."""
    if not isinstance(ids, Tensor):
        raise ValueError(f"{name} is a {type(ids).__name__}; expected a tensor of integers")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {ids.dtype}; expected integers")
    if ids.device != q.device:
        raise ValueError(f"{name} is on {ids.device}; expected {q.device}, where q is")
    rows = ids if ids.ndim == 2 else ids[None]
    if rows.ndim != 2 or rows.shape[0] not in (1, batch) or rows.shape[1] != length:
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected [{length}] or [{batch}, {length}]")
    return rows.to(torch.int64)


def _positions(name: str, ids: Tensor, batch: int, length: int, q: Tensor) -> Tensor:
    rows = _ids(name, ids, batch, length, q)
    # only on the CPU: elsewhere reading them would make the host wait
    if rows.numel() and rows.device.type == "cpu" and not torch.compiler.is_compiling():
        least, most = (int(t) for t in rows.aminmax())
        if max(-least, most) > FARTHEST:
            raise ValueError(
                f"{name} holds {most if most > FARTHEST else least}; expected positions between −2^39 and 2^39, all "
                "distances of which are below an unlimited reach"
            )
    return rows


def _documents(rule: Rule, q: Tensor, b: int, tq: int, tk: int) -> tuple[Tensor | None, Tensor | None]:
    if rule.documents is None:
        return None, None
    if isinstance(rule.documents, tuple):
        return _ids("documents[0]", rule.documents[0], b, tq, q), _ids("documents[1]", rule.documents[1], b, tk, q)
    keys = _ids("documents", rule.documents, b, tk, q)
    if tk < tq:
        raise ValueError(f"documents names {tk} keys for {tq} queries; pass a pair (ids of queries, ids of keys)")
    return keys[:, tk - tq :], keys


def _check_rule(call: Call) -> None:
    rule, (b, h, tq, d), (_, hkv, tk, _) = call.rule, call.q.shape, call.k.shape
    for name in ("span", *TABLES, *KEY_TERMS, "sinks"):
        t = getattr(rule, name)
        if t is not None and t.device != call.q.device:
            raise ValueError(f"{name} is on {t.device}; expected {call.q.device}, where q is")
    if rule.dynamic and rule.span is not None and (rule.span.shape[0] != b or rule.span.shape[2] != tq):
        raise ValueError(f"span has shape {list(rule.span.shape)}; expected [{b}, {h}, {tq}], one for each query")
    if rule.key_bias is not None:
        t = rule.key_bias
        if t.shape[0] not in (1, b) or t.shape[1] not in (1, hkv, h) or t.shape[2] != tk:
            raise ValueError(f"key_bias has shape {list(t.shape)}; expected [1 or {b}, 1 or {hkv} or {h}, {tk}]")
    for name, t in (("key_span", rule.key_span), ("forget", rule.forget)):
        if t is not None and (t.shape[0] not in (1, b) or t.shape[2] != tk):
            raise ValueError(f"{name} has shape {list(t.shape)}; expected [1 or {b}, 1 or {h}, {tk}]")
    if rule.forget is not None and tk < tq:
        raise ValueError(f"forget is given for {tk} keys and {tq} queries; queries are the last of the keys")
    for name, size in (("distance_vec", d), ("distance_value", call.v.shape[3])):
        if (t := getattr(rule, name)) is not None and t.shape[2] != size:
            raise ValueError(f"{name} has shape {list(t.shape)}; expected head size {size} as its last axis")
    tables = [(name, t) for name in ENDING if (t := getattr(rule, name)) is not None]
    # only on the CPU: elsewhere reading spans or positions would make the host wait
    if tables and call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_lengths(call, tables)
    if rule.blocks is not None:
        _check_blocks(call, rule.blocks)


def _check_blocks(call: Call, blocks: BlockIndex) -> None:
    if blocks.offsets.device != call.q.device:
        raise ValueError(f"blocks is on {blocks.offsets.device}; expected {call.q.device}, where q is")
    if call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return
    last = blocks.rows * blocks.size - 1
    q_pos, k_pos = call.positions()
    for what, pos, most in (("query", q_pos, last), ("key", k_pos, None)):
        if not pos.numel():
            continue
        if int(pos.min()) < 0:
            raise ValueError(f"blocks describes positions 0 … {last}; a {what} stands at {int(pos.min())}")
        if most is not None and int(pos.max()) > most:
            raise ValueError(f"blocks describes positions 0 … {last}; a {what} stands at {int(pos.max())}")


def _check_lengths(call: Call, tables: list[tuple[str, Tensor]]) -> None:
    ahead, limit, (behind, before) = call.rule.ahead, max(call.rule.limits()), extents(call)
    needed, needed_ahead = min(limit, behind), max(0, min(limit, before) - 1)
    if not ahead:
        needed = min(limit, longest_distance(call))
    for name, t in tables:
        last = t.shape[1] - 1 - ahead
        if last + 1 < needed:
            raise ValueError(
                f"{name} has shape {list(t.shape)}, distances {-ahead} … {last}; heads here reach "
                f"{needed} distances, so it needs at least {needed}"
            )
        if ahead and ahead < needed_ahead:
            raise ValueError(
                f"{name} has shape {list(t.shape)}, distances {-ahead} … {last}; heads here reach {needed_ahead} "
                f"ahead, so ahead must be at least {needed_ahead}"
            )


def longest_distance(call: Call) -> int:
    """How many distances 0, 1, … can occur between a query and a key of this call."""
    back, ahead = extents(call)
    return back if call.rule.causal else max(back, ahead)


def extents(call: Call) -> tuple[int, int]:
    """How many distances 0, 1, … can occur, and how many 0, −1, …"""
    tq, tk = call.q.shape[2], call.k.shape[2]
    if not tq or not tk or not call.q.shape[0]:
        return 0, 0
    if call.q_positions is None or call.k_positions is None:
        back, ahead = tk - 1, tq - 1  # queries stand at tk − tq … tk − 1
    else:  # row by row: rows of a batch may stand far from each other
        back = int((call.q_positions.amax(1) - call.k_positions.amin(1)).max())
        ahead = int((call.k_positions.amax(1) - call.q_positions.amin(1)).max())
    return max(0, back + 1 - call.shift), max(0, ahead + 1 + call.shift)
