"""Checks every argument of a call against the others; each error names the argument that does not fit.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes of keys and values.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops.blocks import BlockIndex
from spanformer.ops.lower.call import Call, extents, longest_distance
from spanformer.ops.rule import KEY_TERMS, UNLIMITED, Rule
from spanformer.ops.tables import ENDING, TABLES
from spanformer.ops.union import Union

_RULES = (Rule, Union)
_LEARNED = ("span", *TABLES, *KEY_TERMS, "sink_logits")
FARTHEST = UNLIMITED // 2 - 1
"""the largest position, either sign: the distance between any two is then below UNLIMITED"""


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule | Union,
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
        raise ValueError(f"{given} was given without {missing}; pass both or neither")
    if q_positions is not None and k_positions is not None:
        q_positions, k_positions = (
            _positions("q_positions", q_positions, b, tq, q),
            _positions("k_positions", k_positions, b, tk, q),
        )
    elif rule.causal and tk < tq:
        raise ValueError(
            f"k has {tk} keys for {tq} queries; a causal rule takes queries as the last positions of the keys, so it "
            "needs at least as many keys; otherwise pass q_positions and k_positions"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; expected 0 ≤ dropout < 1")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    calls = []
    for leaf in rule.leaves():
        documents = (None, None) if leaf.documents is None else _documents(leaf.documents, q, b, tq, tk)
        call = Call(q, k, v, scale, dropout, seed, q_positions, k_positions, *documents, rule=leaf)
        _check_rule(call)
        calls.append(call)
    return calls[0] if len(calls) == 1 else replace(calls[0], others=tuple(calls[1:]))


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, rule: Rule | Union) -> None:
    if not isinstance(rule, _RULES):
        raise ValueError(f"rule is of type {type(rule).__name__}; expected a Rule, such as AdaptiveSpan.rule() returns")
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
                "of whose distances are below an unlimited reach"
            )
    return rows


def _documents(given: Tensor | tuple[Tensor, Tensor], q: Tensor, b: int, tq: int, tk: int) -> tuple[Tensor, Tensor]:
    if isinstance(given, tuple):
        return _ids("documents[0]", given[0], b, tq, q), _ids("documents[1]", given[1], b, tk, q)
    keys = _ids("documents", given, b, tk, q)
    if tk < tq:
        raise ValueError(
            f"documents has ids for {tk} keys, and there are {tq} queries; pass a pair (ids of queries, ids of keys)"
        )
    return keys[:, tk - tq :], keys


def _check_rule(call: Call) -> None:
    rule, (b, h, tq, d), (_, hkv, tk, _) = call.rule, call.q.shape, call.k.shape
    for name in _LEARNED:
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
        raise ValueError(
            f"forget is given with {tk} keys and {tq} queries; expected at least as many keys, because queries are the "
            "last of them"
        )
    for name, size in (("distance_vec", d), ("distance_value", call.v.shape[3])):
        if (t := getattr(rule, name)) is not None and t.shape[2] != size:
            raise ValueError(f"{name} has shape {list(t.shape)}; expected head size {size} as its last axis")
    tables = [(name, t) for name in ENDING if (t := getattr(rule, name)) is not None]
    # only on the CPU: elsewhere reading spans or positions would make the host wait
    if tables and call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_lengths(call, tables)
    if rule.blocks is not None:
        _check_blocks(call, rule.blocks)
    if rule.orders is not None:
        for name, t, length in zip(("orders[0]", "orders[1]"), rule.orders, (tq, tk), strict=True):
            if t.device != call.q.device or t.shape[1] not in (1, b) or t.shape[2] != length:
                raise ValueError(f"{name} has shape {list(t.shape)} on {t.device}; expected [E, 1 or {b}, {length}]")


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
            raise ValueError(f"blocks describes positions 0 … {last}; a {what} is at {int(pos.min())}")
        if most is not None and int(pos.max()) > most:
            raise ValueError(f"blocks describes positions 0 … {last}; a {what} is at {int(pos.max())}")


def _check_lengths(call: Call, tables: list[tuple[str, Tensor]]) -> None:
    future, limit, (behind, before) = call.rule.max_future, max(call.rule.limits()), extents(call)
    needed, needed_future = min(limit, behind), max(0, min(limit, before) - 1)
    if not future:
        needed = min(limit, longest_distance(call))
    for name, t in tables:
        last = t.shape[1] - 1 - future
        if last + 1 < needed:
            raise ValueError(
                f"{name} has shape {list(t.shape)}, distances {-future} … {last}; heads here reach "
                f"{needed} distances, so it needs at least {needed}"
            )
        if future and future < needed_future:
            raise ValueError(
                f"{name} has shape {list(t.shape)}, distances {-future} … {last}; heads here reach {needed_future} "
                f"tokens of the future, so max_future must be at least {needed_future}"
            )
