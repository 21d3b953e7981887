"""The parts of a model made from its configuration, and how their weights start."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from spanformer.attention import (
    AdaptiveSpan,
    Additive,
    Attention,
    Bilinear,
    Chunked,
    Dot,
    DynamicSpan,
    ExpireSpan,
    Forgetting,
    General,
    GlobalLocal,
    Longformer,
    Mixed,
    Sinks,
    Window,
)
from spanformer.memory import Persistent
from spanformer.model.block import Block
from spanformer.model.config import ModelConfig
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head
from spanformer.model.experts import Experts
from spanformer.model.feedforward import FeedForward
from spanformer.model.kinds import HeadKind
from spanformer.model.layer import SelfAttention
from spanformer.model.norm import make_norm
from spanformer.model.sparse import SPARSE_MAKERS
from spanformer.position import (
    T5,
    Alibi,
    DATransformer,
    DistanceBias,
    Learned,
    Position,
    Rotary,
    Shaw,
    Sinusoidal,
    SinusoidalPerLayer,
    Table,
    TransformerXL,
)

ABSOLUTE = ("none", "sinusoidal", "sinusoidal_per_layer", "learned", "learned_per_layer")
"""positions that are added to the tokens alone"""
LEAST_DYNAMIC = 0.018  # a dynamic span is a sigmoid: it starts above zero, or it would never move


def make_block(config: ModelConfig, parts: list[HeadKind]) -> Block:
    a, norm = config.attention, lambda: make_norm(config.norm, config.dim)
    persistent = Persistent(config.heads, config.head_dim, config.persistent) if config.persistent else None
    mechanism = make_mechanism(config, parts)
    if persistent is not None and mechanism.own_queries:
        raise ValueError(
            f"model.persistent is {config.persistent}, and global tokens of {parts[0].kind} have queries of their own, "
            "which those vectors do not meet; expected 0, or another kind"
        )
    attention = SelfAttention(config.dim, config.groups, mechanism, persistent)
    feedforward = make_feedforward(config)
    norm2, cross, norm3 = None if feedforward is None else norm(), None, None
    if config.kind == "seq2seq":
        cross = CrossAttention(
            config.dim, config.heads, config.groups, scoring=config.cross, dropout=a.dropout, backend=a.backend
        )
        norm3 = norm()
    return Block(attention, norm(), feedforward, norm2, config.order, cross, norm3)


def make_embedding(config: ModelConfig) -> tuple[Embedding, Head] | tuple[AdaptiveEmbedding, AdaptiveHead]:
    """The table of tokens and the output layer."""
    if not config.vocab:
        raise ValueError("model.vocab is 0; expected the number of tokens of the data")
    e = config.embedding
    if e.cutoffs:
        adaptive = AdaptiveEmbedding(config.vocab, config.dim, e.cutoffs, e.divisor)
        tied = adaptive if e.tied else None
        return adaptive, AdaptiveHead(config.vocab, config.dim, e.cutoffs, e.divisor, tied_to=tied)
    plain = Embedding(config.vocab, config.dim)
    head = Head(config.vocab, config.dim, bias=e.bias, tied_to=plain if e.tied else None)
    if e.tied:  # as the output's weight, N(0, 1) would begin with far too certain predictions
        nn.init.normal_(plain.weight, std=config.dim**-0.5)
    return plain, head


def make_mechanism(config: ModelConfig, parts: list[HeadKind]) -> Attention:
    """One mechanism for a layer, whether its heads are of one kind or several."""
    made = [_make_heads(config, part) for part in parts]
    mechanism = made[0] if len(made) == 1 else Mixed(made)
    mechanism.dropout, mechanism.backend = config.attention.dropout, config.attention.backend
    return mechanism


def _make_heads(config: ModelConfig, part: HeadKind) -> Attention:
    made = MAKERS[part.kind](config, part)
    if not config.causal and getattr(made, "causal", True):
        raise ValueError(
            f"an encoder's heads look in both directions, and {part.kind} looks back only; expected another kind, such "
            "as adaptive_span or window"
        )
    return made


def _window(config: ModelConfig, part: HeadKind) -> Attention:
    window = part.number("window", config.attention.window)
    return Window(part.heads, window, original=config.original, causal=config.causal)


def _full(config: ModelConfig, part: HeadKind) -> Attention:
    return Window(part.heads, config.attention.max_span, original=config.original, causal=config.causal)


def _adaptive_span(config: ModelConfig, part: HeadKind) -> Attention:
    a = config.attention
    return AdaptiveSpan(
        part.heads, a.max_span, ramp=a.ramp, init=a.init, penalty=a.penalty, kv_heads=_tied(config, part),
        original=config.original, causal=config.causal,
    )  # fmt: skip


def _dynamic_span(config: ModelConfig, part: HeadKind) -> Attention:
    a = config.attention
    return DynamicSpan(
        config.dim, part.heads, a.max_span, ramp=a.ramp, init=_first_bias(config), penalty=a.penalty,
        kv_heads=_tied(config, part), causal=config.causal,
    )  # fmt: skip


def _expire_span(config: ModelConfig, part: HeadKind) -> Attention:
    a = config.attention
    return ExpireSpan(
        config.dim, part.heads, a.max_span, ramp=a.ramp, init=_first_bias(config), penalty=a.penalty,
        causal=config.causal,
    )  # fmt: skip


def _first_bias(config: ModelConfig) -> float:
    """Of a sigmoid that starts at the share `init` of the longest span."""
    share = min(max(config.attention.init, LEAST_DYNAMIC), 1 - LEAST_DYNAMIC)
    return math.log(share / (1 - share))


def _forgetting(config: ModelConfig, part: HeadKind) -> Attention:
    return Forgetting(config.dim, part.heads, config.attention.max_span)


def _sink_window(config: ModelConfig, part: HeadKind) -> Attention:
    return Sinks(_window(config, part), kept=part.number("kept"))


def _sink_span(config: ModelConfig, part: HeadKind) -> Attention:
    return Sinks(_adaptive_span(config, part), kept=part.number("kept"))


def _longformer(config: ModelConfig, part: HeadKind) -> Attention:
    window, dilation = part.number("window", config.attention.window), part.number("dilation")
    most = part.number("globals")
    return Longformer(
        part.heads * config.head_dim, part.heads, window, positions=range(most), most=most, dilation=dilation,
        farthest=max(config.attention.max_span, window * dilation),
        causal=config.causal, kv_heads=part.heads * config.groups // config.heads,
    )  # fmt: skip


def _etc(config: ModelConfig, part: HeadKind) -> Attention:
    if config.causal:
        raise ValueError(
            f"{part.kind} reads a text whole, in both directions; expected model.kind 'encoder' (for show: --no-causal)"
        )
    if config.groups != config.heads:
        raise ValueError(
            f"model.kv_heads is {config.kv_heads}; {part.kind} adds labels to the keys of every head, expected 0"
        )
    if config.position.kind not in ABSOLUTE:
        raise ValueError(
            f"model.position.kind is {config.position.kind!r}; {part.kind} tells distances by labels of its own, "
            "expected none, or one that is added to the tokens: sinusoidal or learned"
        )
    radius, segment, clip, hard = map(part.number, part.numbers)
    return GlobalLocal(
        part.heads, config.head_dim, radius, segment=segment, clip=clip, hard_g2l=bool(hard),
        apart=part.kind == "etc_apart",
    )  # fmt: skip


def _tied(config: ModelConfig, part: HeadKind) -> int | None:
    return part.heads * config.groups // config.heads if config.attention.tied else None


MAKERS: dict[str, Callable[[ModelConfig, HeadKind], Attention]] = {
    "adaptive_span": _adaptive_span,
    "dynamic_span": _dynamic_span,
    "window": _window,
    "full": _full,
    "expire_span": _expire_span,
    "forgetting": _forgetting,
    "sink_window": _sink_window,
    "sink_span": _sink_span,
    "dot": lambda config, part: Dot(_full(config, part)),
    "general": lambda config, part: General(_full(config, part), config.head_dim),
    "bilinear": lambda config, part: Bilinear(_full(config, part), config.head_dim),
    "additive": lambda config, part: Additive(_full(config, part), config.head_dim),
    "chunked": lambda config, part: Chunked(_full(config, part)),
    **SPARSE_MAKERS,
    "longformer": _longformer,
    "etc": _etc,
    "etc_apart": _etc,
}
"""one for each of kinds.KINDS, and for patterns"""


def make_position(config: ModelConfig, layer: int = 0) -> Position:
    """One encoding, for all layers or (with `position.per_layer`) for one of them, counted from 0."""
    p, heads, size, causal = config.position, config.heads, config.head_dim, config.causal
    longest = config.attention.max_span + (0 if config.original else math.ceil(config.attention.ramp))
    makers: dict[str, Callable[[], Position]] = {
        "none": Position,
        "sinusoidal": lambda: Sinusoidal(config.dim, p.base),
        "sinusoidal_per_layer": lambda: SinusoidalPerLayer(config.dim, layer + 1, p.base),
        "learned": lambda: Learned(config.dim, p.length),
        "learned_per_layer": lambda: Learned(config.dim, p.length),
        "table": lambda: Table(heads, size, longest),
        "shaw": lambda: Shaw(heads, size, p.clip, causal=causal),
        "transformer_xl": lambda: TransformerXL(config.dim, heads, size, causal=causal),
        "rotary": lambda: Rotary(
            size, p.base, scaling=p.scaling, factor=p.factor, trained=p.length if p.scaling == "yarn" else 0
        ),
        "alibi": lambda: Alibi(heads),
        "t5": lambda: T5(heads, causal=causal),
        "distance_bias": lambda: DistanceBias(heads, longest),
        "da_transformer": lambda: DATransformer(heads),
    }
    return makers[p.kind]()


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
