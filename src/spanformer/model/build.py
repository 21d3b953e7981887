"""Build the parts of a model from its configuration (config.py), and initialise their weights."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from spanformer.attention import Attention, MixedMemory, Patterned, RecurrentAttention, mix
from spanformer.depth import ACT, Exits
from spanformer.kinds import KINDS, POSITIONS, HeadSpec, PositionSpec
from spanformer.kinds.notation import PATTERN
from spanformer.memory import Persistent
from spanformer.model.block import Block
from spanformer.model.config import ModelConfig
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head
from spanformer.model.experts import Experts
from spanformer.model.feedforward import FeedForward
from spanformer.model.gates import make_gate
from spanformer.model.layer import SelfAttention
from spanformer.model.norm import make_norm
from spanformer.model.separable_conv import SeparableConv
from spanformer.position import LogScaled, Position


def make_block(config: ModelConfig, specs: list[HeadSpec]) -> Block:
    a, norm = config.attention, lambda: make_norm(config.norm, config.dim)
    persistent = Persistent(config.heads, config.head_dim, config.persistent) if config.persistent else None
    mechanism = make_mechanism(config, specs)
    if persistent is not None and (refused := mechanism.supports(persistent=True)):
        raise ValueError(refused[0])
    attention = SelfAttention(config.dim, config.groups, mechanism, persistent, bias=a.bias)
    feedforward = make_feedforward(config)
    norm2, cross, norm3 = None if feedforward is None else norm(), None, None
    if config.kind == "seq2seq":
        cross = CrossAttention(
            config.dim, config.heads, config.groups, scoring=config.cross, dropout=a.dropout, backend=a.backend
        )
        norm3 = norm()
    gate = partial(make_gate, config.gate, config.dim) if config.block == "gated" else None
    return Block(attention, norm(), feedforward, norm2, config.order, cross, norm3, gate)


def make_embedding(config: ModelConfig) -> tuple[Embedding, Head] | tuple[AdaptiveEmbedding, AdaptiveHead]:
    """The table of tokens and the output layer."""
    if not config.vocab:
        raise ValueError("model.vocab is 0; expected the number of tokens in the vocabulary of the data")
    e = config.embedding
    if e.cutoffs:
        adaptive = AdaptiveEmbedding(config.vocab, config.dim, e.cutoffs, e.divisor)
        tied = adaptive if e.tied else None
        return adaptive, AdaptiveHead(config.vocab, config.dim, e.cutoffs, e.divisor, tied_to=tied, chunk=e.loss_chunk)
    plain = Embedding(config.vocab, config.dim)
    head = Head(config.vocab, config.dim, bias=e.bias, tied_to=plain if e.tied else None, chunk=e.loss_chunk)
    if e.tied:  # as an output weight, N(0, 1) would make the first predictions far too certain
        nn.init.normal_(plain.weight, std=config.dim**-0.5)
    return plain, head


def make_mechanism(config: ModelConfig, specs: list[HeadSpec]) -> Attention:
    """One mechanism for a layer, whether its heads are of one kind or several."""
    made = [make_heads(config, spec) for spec in specs]
    mechanism = mix(made)
    if config.attention.dropout and (found := [type(m).__name__ for m in made if isinstance(m, RecurrentAttention)]):
        raise ValueError(
            f"model.attention.dropout is {config.attention.dropout}, and {found[0]} has no attention weights to drop; "
            "set it to 0, and feedforward.dropout or embedding.dropout instead"
        )
    for part in mechanism.each() if isinstance(mechanism, MixedMemory) else [mechanism]:
        part.dropout, part.backend = config.attention.dropout, config.attention.backend
    return mechanism


def make_heads(config: ModelConfig, spec: HeadSpec) -> Attention:
    """Some heads of a layer, made by the `build` of their kind."""
    if spec.kind == PATTERN:
        return Patterned.parse(spec)
    kind = KINDS[spec.kind]
    made = kind.make()(spec)
    if not config.causal and getattr(made, "causal", True):
        raise ValueError(
            f"model.attention.kind is {spec.kind!r}, which is causal only; an encoder needs both directions: use "
            "another kind, such "
            "as adaptive_span or window"
        )
    if kind.absolute_positions and not POSITIONS[config.position.kind].absolute:
        known = [name for name, position in POSITIONS.items() if position.absolute]
        raise ValueError(
            f"model.position.kind is {config.position.kind!r}; {spec.kind} encodes distances by its labels; "
            f"expected one of {', '.join(known)}"
        )
    return made


def make_position(config: ModelConfig, layer: int = 0) -> Position:
    """One encoding, for all layers or (where each layer has its own) for one of them, counted from 0."""
    p, a = config.position, config.attention
    spec = PositionSpec(
        dim=config.dim, heads=config.heads, head_dim=config.head_dim, causal=config.causal, layer=layer,
        max_distance=a.max_span + (0 if config.paper_compat else math.ceil(a.ramp)), base=p.base, length=p.length,
        clip=p.clip, scaling=p.scaling, factor=p.factor,
    )  # fmt: skip
    made = POSITIONS[p.kind].make()(spec)
    return LogScaled(made, p.log_scale) if p.log_scale else made


def make_depth(config: ModelConfig) -> ACT | Exits | None:
    """What decides how many layers each token runs through."""
    d = config.depth
    if d.kind == "fixed":
        return None
    if d.kind == "exits":
        return Exits(
            config.dim, config.layers, training=d.training, rising=d.rising,
            classifier=None if d.classifier == "none" else d.classifier, oracle=d.oracle, price=d.price,
            smoothing=d.smoothing, weight=d.weight, maps=d.maps,
        )  # fmt: skip
    return ACT(config.dim, config.layers, epsilon=d.epsilon, bias=d.bias, cost=d.cost, warmup=d.warmup, form=d.form)


def make_feedforward(config: ModelConfig) -> nn.Module | None:
    f = config.feedforward
    if f.kind == "none":
        return None
    if f.kind == "separable_conv":
        return SeparableConv(
            config.dim, f.dim or 4 * config.dim, f.kernel, causal=config.causal, bias=f.bias, dropout=f.dropout,
            chunk=f.chunk,
        )  # fmt: skip
    inner = f.dim or (-(-8 * config.dim // 3 // 32) * 32 if f.kind == "swiglu" else 4 * config.dim)
    if f.experts:
        return Experts(
            config.dim, inner, experts=f.experts, per_token=f.per_token, kind=f.kind, bias=f.bias, dropout=f.dropout,
            balance=f.balance, chunk=f.chunk,
        )  # fmt: skip
    return FeedForward(config.dim, inner, kind=f.kind, bias=f.bias, dropout=f.dropout, chunk=f.chunk)
