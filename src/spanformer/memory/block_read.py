"""Attention of a piece of new tokens to a memory of blocks (blocks.py): from stored keys and values in decoding,
from projections of stored hidden states in training.

Shapes: B batch, T new tokens, R ring, N compressed slots, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall
from spanformer.memory.block_layout import NONE, Layout, Piece, Tensors, of_new, placed
from spanformer.ops import AnyRule, Attended, Rule, attend


class Keys(NamedTuple):
    """Compressed slots, and tokens behind them."""

    k: Tensor
    """[B, heads, slots + tokens, D]"""
    v: Tensor
    at: Tensor
    """[B, slots + tokens] positions; NONE: not there"""
    document: Tensor
    slots: int = 0
    encoded: bool = False
    """whether positions are encoded in k"""


def exact_keys(layout: Layout, held: Tensors, call: LayerCall) -> Keys:
    """Of the tokens that the first piece sees exactly, projected again, and of all new ones."""
    start, (b, _, new, _), k, v = call.view.start, call.q.shape, call.k, call.v
    first = layout.first_exact(start)
    slot = torch.arange(first, start, device=call.q.device) % layout.ring
    if start > first:
        old = call.project(held["states"][:, slot], None)
        k, v = (torch.cat([a, c], 2) for a, c in zip(old, (k, v), strict=True))
    padding, document = (of_new(t, new, slice(None)) for t in (call.view.padding, call.view.documents))
    at = torch.arange(start, start + new, device=call.q.device).expand(b, -1)
    document = torch.full_like(at, NONE) if document is None else document
    at = at if padding is None else at.masked_fill(padding, NONE)
    at, document = (
        torch.cat([held[name][:, layout.kept + slot], t], 1) for name, t in (("at", at), ("document", document))
    )
    return Keys(k, v, at, document)


def read(layout: Layout, held: Tensors, call: LayerCall, piece: Piece, exact: Keys | None) -> Attended:
    """Attention of a piece, whose tokens are in the ring. exact: None in decoding."""
    parts, order = [], []
    for n, (heads, slots) in enumerate(layout.groups()):
        if exact is None:
            first = layout.kept - slots
            at, document = held["at"][:, first:], held["document"][:, first:]
            keys = Keys(held[f"keys{n}"], held[f"values{n}"], at, document, slots, encoded=True)
        else:
            keys = _projected(layout, held, call, piece, exact, heads, slots)
        parts.append(_read(layout, held, call, piece, heads, keys))
        order += [g * call.shared + m for g in heads for m in range(call.shared)]
    if len(parts) == 1:
        return parts[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    return Attended(*(torch.cat(each, 1)[:, back] for each in zip(*parts, strict=True)))


def _projected(
    layout: Layout, held: Tensors, call: LayerCall, piece: Piece, exact: Keys, heads: list[int], slots: int
) -> Keys:  # fmt: skip
    assert piece.start is not None
    begin, first = (layout.first_exact(at) for at in (piece.start, call.view.start))
    some = slice(begin - first, piece.start + piece.last - piece.first - first)
    whole = len(heads) == layout.shape.kv_heads
    k, v = ((t if whole else t[:, heads])[:, :, some] for t in (exact.k, exact.v))
    at, document = exact.at[:, some], exact.document[:, some]
    slots = min(slots, begin // layout.sizes.ratio)  # nothing is in the others yet
    if slots:
        old = call.project(held["slots"][:, :slots], None if whole else heads)
        k, v = (torch.cat([a, c], 2) for a, c in zip(old, (k, v), strict=True))
        at, document = (torch.cat([held[n][:, :slots], t], 1) for n, t in (("at", at), ("document", document)))
    return Keys(k, v, at, document, slots)


def _read(layout: Layout, held: Tensors, call: LayerCall, piece: Piece, heads: list[int], keys: Keys) -> Attended:
    some, mechanism, view = slice(piece.first, piece.last), call.mechanism, call.view
    queries = [g * call.shared + m for g in heads for m in range(call.shared)]
    whole = len(queries) == mechanism.heads
    ids = of_new(view.documents, call.q.shape[2], some)
    seen = replace(
        placed(view, piece.at, keys.at.clamp(min=0)),
        x=view.x[:, some],
        padding=layout.hidden(keys.at, piece, keys.slots),
        documents=None if ids is None else (ids, keys.document),
    )
    encode = call.position.encode if whole else call.position.encode_for(queries)
    fresh = 0 if keys.encoded else keys.k.shape[2]
    k_view = replace(seen, k_positions=seen.k_positions[:, :fresh])
    q, k = encode((call.q if whole else call.q[:, queries])[:, :, some], keys.k[:, :, :fresh], k_view)
    k = keys.k if keys.encoded else k
    if layout.sizes.most_used:
        _count_use(layout, held, call, piece, queries, heads, q, k, seen)
    return mechanism(q, k, keys.v, _rule(call, queries, heads), seen)


def _rule(call: LayerCall, queries: list[int], heads: list[int]) -> AnyRule:
    """Of some query heads and their key/value heads."""
    rule, added = call.mechanism.rule(call.view), call.position.rule(call.view, call.mechanism.reach)
    rule = rule if added is None else rule + added
    return rule if len(queries) == call.mechanism.heads else rule.for_heads(queries, heads)


def _count_use(
    layout: Layout, held: Tensors, call: LayerCall, piece: Piece, queries: list[int], heads: list[int], q: Tensor,
    k: Tensor, view: Any,
) -> None:  # fmt: skip
    """Add the attention that tokens of earlier blocks receive: ∂ Σ_i lse_i / ∂ bias_j = Σ_i a_ij."""
    padding = of_new(call.view.padding, call.q.shape[2], slice(piece.first, piece.last))
    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # not those of a checkpoint around this
    with torch.inference_mode(False), torch.enable_grad(), same:  # clones: inference tensors have no gradients
        rule, q, k = _rule(call, queries, heads), q.detach().clone(), k.detach().clone()
        documents = None if view.documents is None else tuple(t.clone() for t in view.documents)
        bias = torch.zeros(view.padding.shape, dtype=q.dtype, device=q.device).masked_fill(view.padding, -torch.inf)
        bias = bias[:, None].requires_grad_()
        seen = rule + Rule(rule.heads, key_bias=bias, documents=documents)
        lse = attend(q, k, k, seen, q_positions=view.q_positions.clone(), k_positions=view.k_positions.clone()).lse
        counted = lse.isfinite() if padding is None else lse.isfinite() & ~padding[:, None]
        (found,) = torch.autograd.grad(torch.where(counted, lse, 0).sum(), bias)
    age = piece.block[:, None] - view.k_positions.div(layout.sizes.block, rounding_mode="floor")
    counted = ~view.padding & (age > 0) & (age <= layout.sizes.behind)
    at = view.k_positions % held["usage"].shape[1]
    held["usage"].scatter_add_(1, at, found[:, 0].double().masked_fill(~counted, 0))
