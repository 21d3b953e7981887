"""Attention of many new tokens over a layer's rings and over themselves: prefill, and continuing a prompt.

Heads run in groups of similar reach, so that short heads do not pay for long ones.
Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.memory.groups import group_heads
from spanformer.memory.notes import take_notes, with_notes
from spanformer.memory.slots import read_notes, read_slots
from spanformer.ops import AnyRule, Attended, Rule, attend

if TYPE_CHECKING:
    from spanformer.memory.head_cache import HeadCache

RuleFor = Callable[[Tensor, int, int], AnyRule]


def attend_many(
    cache: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, backend: str, scale: float | None
) -> Attended:
    """Attention of new tokens over the keys in the rings and over themselves, in groups of similar reach."""
    shared, shift = rule.heads // len(cache.reach), 1 if rule.paper_compat else 0
    back = [max(n - 1 + shift, 0) for n in rule.limits()]
    need = [min(max(back[g * shared : (g + 1) * shared]), cache.reach[g]) for g in range(len(cache.reach))]
    groups = group_heads(need, int(cache.place.max()) if cache.batch else 0, q.device)
    parts, order = [], []
    for kv_heads, past in groups:
        heads = [g * shared + n for g in kv_heads for n in range(shared)]
        some = (q, k, v, rule)
        if len(groups) > 1:
            some = q[:, heads], k[:, kv_heads], v[:, kv_heads], rule.for_heads(heads, kv_heads)
        parts.append(_attend_group(cache, *some, kv_heads, past, backend, scale))
        order += heads
    if len(parts) == 1:
        return parts[0]
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
    return Attended(*(torch.cat(t, 1).index_select(1, back) for t in zip(*parts, strict=True)))


def _attend_group(
    cache: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, kv_heads: list[int], past: int, backend: str,
    scale: float | None, notes: Tensor | None = None,
) -> Attended:  # fmt: skip
    """Attention of heads that get `past` earlier tokens each. Rules depend only on distances, so rows at different
    positions run together, each row's newest tokens last. notes [B, heads, T]: those of the new tokens, if any."""
    t = k.shape[2]
    if notes is not None:
        held = [read_notes(cache.store, None, kv_heads, cache.sink_tokens)] if cache.sink_tokens else []
        held += [read_notes(cache.store, cache.place, kv_heads, past)] if past else []
        rule = with_notes(rule, torch.cat([*held, notes], 2), torch.promote_types(q.dtype, torch.float32))
    if past:
        old = read_slots(cache.store, cache.place, kv_heads, past, cache.dtype)
        if cache.recent is not None:
            old = cache.recent.over(old, cache.place, kv_heads, cache.dtype)
        k, v = (torch.cat([held.to(new.dtype), new], 2) for held, new in zip(old, (k, v), strict=True))
    hidden = _hidden(cache, kv_heads, past, t)
    if cache.sink_tokens:
        return _with_sink_tokens(cache, q, k, v, rule, kv_heads, hidden, backend, scale)
    if hidden is not None:
        rule = rule + Rule(rule.heads, causal=False, key_bias=hidden)
    return attend(q, k, v, rule, backend=backend, scale=scale)


def _hidden(cache: HeadCache, kv_heads: list[int], past: int, new: int) -> Tensor | None:
    """[B, heads, past + new] −inf for positions that a row has not read yet or that a ring no longer holds."""
    oldest = cache.oldest()
    oldest = torch.zeros(cache.batch, len(kv_heads), dtype=torch.int64) if oldest is None else oldest[:, kv_heads]
    missing = past - (cache.place[:, None] - oldest)  # [B, heads]
    if not cache.batch or int(missing.max()) <= 0:
        return None
    column = torch.arange(past + new)
    bias = torch.zeros(*missing.shape, past + new).masked_fill(column < missing[..., None], -math.inf)
    return bias.to(cache.device)


def _with_sink_tokens(
    cache: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, kv_heads: list[int], hidden: Tensor | None,
    backend: str, scale: float | None,
) -> Attended:  # fmt: skip
    """Sink tokens come before the others, at their own positions. A ring hides its own copies of them."""
    places, t, b = cache.place.to(q.device)[:, None], q.shape[2], cache.batch
    early = read_slots(cache.store, None, kv_heads, cache.sink_tokens, cache.dtype)
    k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in zip(early, (k, v), strict=True))
    first = torch.arange(cache.sink_tokens, device=q.device).expand(b, -1)
    others = places + t - k.shape[2] + cache.sink_tokens + torch.arange(k.shape[2] - cache.sink_tokens, device=q.device)
    # a sink token is either stored or new, never both; its copy in a ring is hidden
    absent = torch.cat([first >= places, (others < cache.sink_tokens) & (others < places)], 1)  # [B, Tk]
    bias = torch.zeros(b, len(kv_heads), k.shape[2], device=q.device)
    if hidden is not None:
        bias[..., cache.sink_tokens :] += hidden
    rule = rule + Rule(rule.heads, causal=False, key_bias=bias.masked_fill_(absent[:, None], -math.inf))
    where = torch.cat([first, others], 1).masked_fill_(absent, -1)
    at = places + torch.arange(t, device=q.device)
    return attend(q, k, v, rule, backend=backend, scale=scale, q_positions=at, k_positions=where)


def attend_many_placed(
    cache: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule_for: RuleFor, rows: Tensor, place: int, backend: str,
    scale: float | None,
) -> tuple[Attended, Tensor | None]:  # fmt: skip
    """Attention of rows that are all at `place`, and the notes [n, H, T] of their new tokens."""
    shared, t = q.shape[1] // len(cache.reach), q.shape[2]
    groups = group_heads([n - 1 for n in cache.reach], place, q.device)
    mine = cache if len(rows) == cache.batch else cache.rows(rows)
    parts, order, noted = [], [], None
    every = list(range(len(cache.reach)))
    last = read_notes(mine.store, mine.place, every, min(place, 1)).sum(-1) if cache.notes else None
    for kv_heads, past in groups:
        heads = [g * shared + n for g in kv_heads for n in range(shared)]
        held = [n for n in cache.reach for _ in range(shared)]  # older slots of a shorter ring hold other tokens
        rule = rule_for(rows, place - past, past + t) + Rule(q.shape[1], causal=False, reach=held)
        if last is not None and noted is None:
            noted = take_notes(rule, len(rows), t, last)
        some = q[:, heads], k[:, kv_heads], v[:, kv_heads], rule.for_heads(heads, kv_heads)
        of_heads = None if noted is None else noted[:, heads]
        parts.append(_attend_group(mine, *some, kv_heads, past, backend, scale, of_heads))
        order += heads
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
    return Attended(*(torch.cat(p, 1).index_select(1, back) for p in zip(*parts, strict=True))), noted
