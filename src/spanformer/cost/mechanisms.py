"""The cost of each attention mechanism.

n tokens, H heads and G key/value heads of size D, B texts, P pairs of query and key that one head sees
(`spanformer.cost.pairs`), b bytes a number. A multiply and its add are two operations.

    FLOPs         forward 4·D·P a head (q·k and p·v); a backward pass 10·D·P (q·k again, and into p, q, k, v). Products
                  that a mechanism has beside (mapped queries, gates, projections of its own) are added, and twice as
                  many in a backward pass. This is the minimum, without the overhang of blocks
    dense         b·B·H·n²: the weights of an implementation that computes every pair and masks
    weights       b·B·H·P: of one that stores a weight for each pair its pattern sees
    ours          4·B·H·n: one number a query, the log of the softmax's sum; weights are computed again when needed
    activations   what a training step keeps of the operation until its backward pass, q, k, v and the output:
                  b·B·n·D·(2·H + 2·G), and ours; one output more where two parts are joined under one softmax, and what
                  else the functions of `activations` say. Hidden states that gates and projections read are the layer's
    cache         2·b·B·G·D times the keys that ours holds on to, up to the farthest that a later query can see

Mechanisms that are no masked softmax over pairs define their own operations and numbers. Each kind's spec
(spanformer.kinds) holds its `Cost`; `pairs` has a function for each pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from types import SimpleNamespace

from spanformer.cost import activations
from spanformer.cost.sizes import LSE, Sizes

Params = SimpleNamespace
"""a mechanism's parameters as attributes"""
Pairs = Callable[[int, bool, Params], float]

BACKWARD = 2.5
"""products of a backward pass for each of the forward pass: 5 for 2"""
BESIDE = 2
"""the same of products that are not of pairs, as those of any matrix"""
STATE = 4
"""bytes of a number of a recurrent state, at least"""
NOTE = 8
"""bytes of a number that a cache notes of a key: it is kept in float64"""


@dataclass(frozen=True)
class Cost:
    """What a mechanism costs. Functions take the mechanism's parameters as attributes of `p`, by their names."""

    keys: str
    """formula of the keys that a query sees far from the edges, or of what else is counted"""
    pairs: Pairs | None
    """(n, causal, p): pairs of one head, on average where heads differ; None: it has none"""
    cached: Callable[[int, Params], float] | None
    """(n, p): keys that a KV cache holds, on average where heads differ; None: it reads a text whole and decodes
    nothing"""
    _: KW_ONLY
    assumed: Mapping[str, int] = field(default_factory=dict)
    """quantities that training determines, such as the mean of learned spans, with their assumed defaults"""
    per_pair: int = 4
    """operations forward for each pair and number of a head"""
    extra: Callable[[Sizes, Params], int] | None = None
    """operations forward beside those of pairs, of one text in one layer"""
    forward: Callable[[Sizes, Params], int] | None = None
    """the same of operations that have no gradient, such as hashing"""
    stored: Callable[[int, int, Params], int] | None = None
    """(n, D, p): numbers one head holds in the place of weights, where they are not one a pair"""
    state: Callable[[int, Params], int] | None = None
    """(D, p): numbers one query head keeps for decoding in the place of keys and values"""
    recurrent: Callable[[int, Params], int] | None = None
    """(D, p): numbers of one KV head's recurrent state, in float32 or wider"""
    noted: bool = False
    """the KV cache also stores one number per key and query head"""
    kept: Callable[[Sizes, Params], activations.Kept] | None = lambda s, p: activations.softmax(s)
    """what is kept for the backward pass; None: not predicted"""
    source: bool = False
    """its keys are another text's"""
    alone: Callable[[Params], bool] = lambda p: False
    """whether it computes its output itself and cannot share a layer with other kinds"""


def gates(s: Sizes, p: Params) -> int:
    """One number per token and head, a projection of the hidden state."""
    return 2 * s.rows * s.dim


def query_maps(s: Sizes, p: Params) -> int:
    """Queries times a matrix."""
    return 2 * s.queried * s.head_dim


def every(n: int, p: Params) -> int:
    """Keys in a KV cache that drops none."""
    return n


def up_to_max_span(n: int, p: Params) -> int:
    return p.max_span


@dataclass(frozen=True)
class AttentionCost:
    """Of one layer and all its heads, for a whole batch."""

    kind: str
    about: str
    pairs: float | None
    """of one head and one text"""
    keys: float | None
    """a query sees on average"""
    flops: int
    """forward"""
    flops_backward: int
    weight_bytes: int
    """weights, if one is stored for each pair seen; a state, if there is one in their place"""
    activation_bytes: int | None
    """what the operation keeps for its backward pass, as ours does: q, k, v, the output, one number a query, and what
    the mechanism needs beside; None: not predicted (of patterns, and of what ours does not have)"""
    dense_activation_bytes: int
    """the same with every pair's weight in the place of the output and that number"""
    cache_bytes: int | None
    """keys and values that decoding goes on with, or the state; None: it does not decode"""

    def row(self) -> dict:
        return asdict(self)


def together(kind: str, parts: Sequence[tuple[int, AttentionCost]]) -> AttentionCost:
    """What heads of several kinds cost in one layer: (how many, what these cost)."""
    heads, costs = sum(count for count, _ in parts), [cost for _, cost in parts]

    def total(name: str) -> int | None:
        found = [getattr(cost, name) for cost in costs]
        return None if None in found else sum(found)

    def mean(name: str) -> float | None:
        found = [(count, getattr(cost, name)) for count, cost in parts]
        return None if any(value is None for _, value in found) else sum(c * value for c, value in found) / heads

    sums = {name: total(name) for name in ("flops", "flops_backward", "weight_bytes", "activation_bytes",
                                           "dense_activation_bytes", "cache_bytes")}  # fmt: skip
    about = "; ".join(f"{count}: {cost.about}" for count, cost in parts)
    return AttentionCost(kind=kind, about=about, pairs=mean("pairs"), keys=mean("keys"), **sums)  # pyright: ignore


def attention_cost(name: str, about: str, cost: Cost, params: Mapping[str, float | str], sizes: Sizes) -> AttentionCost:
    """What a mechanism with these parameters costs at these sizes; `name` and `about` describe it in tables.

    One that cannot be causal is counted as it is, in both directions.
    """
    p, n, d = SimpleNamespace(**params), sizes.length, sizes.head_dim
    seen = None if cost.pairs is None else cost.pairs(n, sizes.causal and cost.cached is not None, p)
    own = cost.extra(sizes, p) if cost.extra else 0
    once = cost.forward(sizes, p) if cost.forward else 0
    flops = cost.per_pair * sizes.heads * d * (seen or 0)
    held = seen if cost.stored is None else cost.stored(n, d, p)
    assert held is not None
    kept = None if cost.kept is None else cost.kept(sizes, p)
    keys = cost.cached(n, p) if cost.source and cost.cached else n
    times, b = sizes.times, sizes.item
    dense = sizes.queried + sizes.keyed * keys / n + sizes.rows * keys
    return AttentionCost(
        kind=name,
        about=about,
        pairs=seen,
        keys=None if seen is None else seen / n,
        flops=int(times * (flops + own + once)),
        flops_backward=int(times * (BACKWARD * flops + BESIDE * own)),
        weight_bytes=int(b * times * sizes.heads * held),
        activation_bytes=None if kept is None else round(times * (b * kept.numbers + LSE * kept.wide)),
        dense_activation_bytes=round(b * times * dense),
        cache_bytes=_cache(cost, p, sizes),
    )


def _cache(cost: Cost, p: Params, sizes: Sizes) -> int | None:
    if cost.cached is None:
        return None
    if cost.state is not None:
        return sizes.item * sizes.times * sizes.heads * cost.state(sizes.head_dim, p)
    item, state = sizes.item, 0
    if cost.recurrent is not None:  # keys beside a state are as wide
        item = max(sizes.item, STATE)
        state = item * sizes.times * sizes.groups * cost.recurrent(sizes.head_dim, p)
    keys = cost.cached(sizes.length, p)
    keys = keys if cost.source else min(sizes.length, keys)
    note = NOTE * sizes.times * sizes.heads if cost.noted else 0
    return state + int((2 * item * sizes.times * sizes.groups * sizes.head_dim + note) * keys)
