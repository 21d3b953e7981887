"""Checks of a Rule's terms. Each error names the term, its value and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.ops.blocks import BlockIndex
from spanformer.ops.tables import TABLES

if TYPE_CHECKING:
    from spanformer.ops.rule import Rule

KEY_TERMS = ("key_bias", "key_span", "forget")
"""terms whose last axis counts keys"""
RAMPS = 1e-38, 1e38  # numbers that float32 can divide by


def check_numbers(rule: Rule) -> None:
    for name, least, unit in (("heads", 1, "heads"), ("sink_tokens", 0, "tokens"), ("max_future", 0, "distances")):
        n = getattr(rule, name)
        if not isinstance(n, int) or n < least:
            raise ValueError(f"{name} is {n!r}; expected a whole number of {unit}, {least} or more")
    if not RAMPS[0] <= rule.ramp <= RAMPS[1]:
        raise ValueError(
            f"ramp is {rule.ramp}; expected a positive, finite number of tokens, {RAMPS[0]:g} … {RAMPS[1]:g}"
        )


def check_shapes(rule: Rule) -> None:
    h = rule.heads
    for name in ("span", *TABLES, *KEY_TERMS, "sink_logits"):
        t = getattr(rule, name)
        if t is not None and not isinstance(t, Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}; expected a tensor")
    if rule.span is not None:
        static, dynamic = rule.span.shape == (h,), rule.span.ndim == 3 and rule.span.shape[1] == h
        expect(static or dynamic, "span", rule.span, f"[{h}] (static) or [B, {h}, Tq] (dynamic)")
        expect(rule.span.is_floating_point(), "span", rule.span, "a floating-point dtype")
    for name in ("distance_bias", "distance_scale"):
        if (t := getattr(rule, name)) is not None:
            expect(t.ndim == 2 and t.shape[0] == h and t.shape[1] > 0, name, t, f"[{h}, L], L at least 1")
            expect(t.is_floating_point(), name, t, "a floating-point dtype")
    for name, size in (("distance_vec", "D"), ("distance_value", "Dv")):
        if (t := getattr(rule, name)) is not None:
            fits = t.ndim == 3 and t.shape[0] in (1, h) and t.shape[1] > 0
            expect(fits, name, t, f"[1 or {h}, L, {size}], L at least 1")
            expect(t.is_floating_point(), name, t, "a floating-point dtype")
    if rule.key_bias is not None:
        t = rule.key_bias
        fits = t.ndim == 3 and t.shape[1] > 0 and h % t.shape[1] == 0
        expect(fits, "key_bias", t, "[1 or B, 1 or Hkv or H, Tk]")
        expect(t.is_floating_point(), "key_bias", t, "a floating-point dtype (−inf hides a key)")
    for name, t in (("key_span", rule.key_span), ("forget", rule.forget)):
        if t is not None:
            expect(t.ndim == 3 and t.shape[1] in (1, h), name, t, f"[1 or B, 1 or {h}, Tk]")
            expect(t.is_floating_point(), name, t, "a floating-point dtype")
    if rule.sink_logits is not None:
        expect(rule.sink_logits.shape == (h,), "sink_logits", rule.sink_logits, f"[{h}]")
        expect(rule.sink_logits.is_floating_point(), "sink_logits", rule.sink_logits, "a floating-point dtype")
    if rule.documents is not None:
        pair = rule.documents if isinstance(rule.documents, tuple) else (rule.documents,) * 2
        if len(pair) != 2 or not all(isinstance(ids, Tensor) for ids in pair):
            raise ValueError(
                f"documents is a {type(rule.documents).__name__}; expected a tensor of ids, or a pair of tensors (ids "
                "of "
                "queries, ids of keys)"
            )
        for ids in pair:
            expect(ids.ndim in (1, 2), "documents", ids, "[T] or [B, T]")
            expect(not ids.is_floating_point() and ids.dtype != torch.bool, "documents", ids, "integer ids")
    if rule.blocks is not None:
        if not isinstance(rule.blocks, BlockIndex):
            raise ValueError(f"blocks is a {type(rule.blocks).__name__}; expected a BlockIndex")
        expect(rule.blocks.offsets.shape[0] in (1, h), "blocks.offsets", rule.blocks.offsets, f"[1 or {h}, rows + 1]")


def check_orders(rule: Rule) -> None:
    if rule.orders is None:
        return
    pair = rule.orders
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise ValueError("orders is no pair of tensors; expected the places (of queries, of keys)")
    for t in pair:
        expect(t.ndim == 3 and t.shape[0] == pair[0].shape[0] and t.dtype == torch.int64, "orders", t,
               "[E, 1 or B, T] of int64, one E for queries and keys")  # fmt: skip
    beside = [name for name in (*TABLES, "key_span", "forget", "blocks") if getattr(rule, name) is not None]
    beside += ["sink_tokens"] if rule.sink_tokens else []
    beside += [name for name, plain in (("stride", 1), ("skip", 0)) if getattr(rule, name) != plain]
    if beside or not rule.causal:
        raise ValueError(
            f"orders is beside {' and '.join(beside) or 'causal=False'}; expected a causal rule of reach, span, "
            "documents and key_bias"
        )


def as_reach(reach: Tensor | Sequence[int] | int, heads: int) -> Tensor:
    if isinstance(reach, int):
        reach = [reach] * heads
    if isinstance(reach, float | str):
        raise ValueError(f"reach is {reach!r}; expected a whole number of tokens, or {heads} of them in a tensor")
    given = reach if isinstance(reach, Tensor) else torch.tensor(list(reach))
    expect(given.shape == (heads,), "reach", given, f"[{heads}]")
    if given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"reach has dtype {given.dtype}; expected whole numbers of tokens")
    if given.is_meta:
        raise ValueError("reach is on the meta device, which has no numbers; expected a tensor on a real device")
    tensor = given.detach().to("cpu", torch.int64, copy=True).contiguous()  # the caller may change it later
    if not torch.compiler.is_compiling() and int(tensor.min()) < 0:
        raise ValueError(f"reach holds {int(tensor.min())}; expected numbers of tokens, at least 0")
    return tensor


def per_head(name: str, given: Sequence[int] | int, heads: int, least: int) -> tuple[int, ...] | int:
    """One number if all heads have the same."""
    numbers = (given,) * heads if isinstance(given, int) else tuple(given)
    if len(numbers) != heads or not all(isinstance(n, int) and n >= least for n in numbers):
        raise ValueError(f"{name} is {given}; expected a whole number of at least {least}, or {heads} of them")
    return numbers[0] if len(set(numbers)) == 1 else numbers


def expect(ok: bool, name: str, tensor: Tensor, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}; expected {expected}")
