"""The parts of a model made from its configuration, and how their weights start."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from spanformer.attention import AdaptiveSpan, Attention, DynamicSpan, Mixed, Window
from spanformer.memory import Persistent
from spanformer.model.block import Block
from spanformer.model.config import ModelConfig
from spanformer.model.experts import Experts
from spanformer.model.feedforward import FeedForward
from spanformer.model.kinds import HeadKind
from spanformer.model.layer import SelfAttention
from spanformer.model.norm import make_norm
from spanformer.position import Alibi, DistanceBias, Position, Rotary, Table

LEAST_DYNAMIC = 0.018  # a dynamic span is a sigmoid: it starts above zero, or it would never move


def make_block(config: ModelConfig, parts: list[HeadKind]) -> Block:
    persistent = Persistent(config.heads, config.head_dim, config.persistent) if config.persistent else None
    attention = SelfAttention(config.dim, config.groups, make_mechanism(config, parts), persistent)
    feedforward = make_feedforward(config)
    norm2 = None if feedforward is None else make_norm(config.norm, config.dim)
    return Block(attention, make_norm(config.norm, config.dim), feedforward, norm2, config.order)


def make_mechanism(config: ModelConfig, parts: list[HeadKind]) -> Attention:
    """One mechanism for a layer, whether its heads are of one kind or several."""
    made = [_make_heads(config, part) for part in parts]
    mechanism = made[0] if len(made) == 1 else Mixed(made)
    mechanism.dropout, mechanism.backend = config.attention.dropout, config.attention.backend
    return mechanism


def _make_heads(config: ModelConfig, part: HeadKind) -> Attention:
    return MAKERS[part.kind](config, part)


def _window(config: ModelConfig, part: HeadKind) -> Attention:
    return Window(part.heads, part.numbers["window"] or config.attention.window, original=config.original)


def _full(config: ModelConfig, part: HeadKind) -> Attention:
    return Window(part.heads, config.attention.max_span, original=config.original)


def _adaptive_span(config: ModelConfig, part: HeadKind) -> Attention:
    a = config.attention
    return AdaptiveSpan(
        part.heads, a.max_span, ramp=a.ramp, init=a.init, penalty=a.penalty, kv_heads=_tied(config, part),
        original=config.original,
    )  # fmt: skip


def _dynamic_span(config: ModelConfig, part: HeadKind) -> Attention:
    a = config.attention
    share = min(max(a.init, LEAST_DYNAMIC), 1 - LEAST_DYNAMIC)
    bias = math.log(share / (1 - share))
    return DynamicSpan(
        config.dim, part.heads, a.max_span, ramp=a.ramp, init=bias, penalty=a.penalty, kv_heads=_tied(config, part)
    )


def _tied(config: ModelConfig, part: HeadKind) -> int | None:
    return part.heads * config.groups // config.heads if config.attention.tied else None


MAKERS: dict[str, Callable[[ModelConfig, HeadKind], Attention]] = {
    "adaptive_span": _adaptive_span,
    "dynamic_span": _dynamic_span,
    "window": _window,
    "full": _full,
}
"""one for each of kinds.KINDS"""


def make_position(config: ModelConfig) -> Position:
    p, heads = config.position, config.heads
    longest = config.attention.max_span + (0 if config.original else math.ceil(config.attention.ramp))
    if p.kind == "rotary":
        return Rotary(config.head_dim, base=p.base)
    if p.kind == "alibi":
        return Alibi(heads)
    if p.kind == "distance_bias":
        return DistanceBias(heads, longest)
    if p.kind == "table":
        return Table(heads, config.head_dim, longest)
    return Position()


def make_feedforward(config: ModelConfig) -> nn.Module | None:
    f = config.feedforward
    if f.kind == "none":
        return None
    inner = f.dim or (-(-8 * config.dim // 3 // 32) * 32 if f.kind == "swiglu" else 4 * config.dim)
    if f.experts:
        return Experts(
            config.dim, inner, experts=f.experts, per_token=f.per_token, kind=f.kind, bias=f.bias, dropout=f.dropout,
            balance=f.balance,
        )  # fmt: skip
    return FeedForward(config.dim, inner, kind=f.kind, bias=f.bias, dropout=f.dropout)
