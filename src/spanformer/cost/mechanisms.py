"""The cost of each attention mechanism.

n tokens, H heads and G key/value heads of size D, B texts, P query–key pairs that one head sees
(`spanformer.cost.pairs`), b bytes per number. A multiply and an add are two operations.

    FLOPs         forward 4·D·P per head (q·k and p·v), backward 10·D·P (q·k again, and the gradients of p, q, k, v).
                  Further products of a mechanism (mapped queries, gates, its own projections) are added, and twice as
                  many for the backward pass. This is the minimum: partly visible blocks are not rounded up
    dense         b·B·H·n²: the weights of an implementation that computes every pair and masks
    weights       b·B·H·P: the weights of one that stores only the visible pairs
    ours          4·B·H·n: one number per query, the log-sum-exp; weights are recomputed when needed
    activations   what a training step stores until the backward pass: q, k, v and the output, b·B·n·D·(2·H + 2·G), and
                  `ours`; one more output if two parts are merged under one softmax, and what the functions of
                  `activations` add. Hidden states that gates and projections read are counted with the layer
    cache         2·b·B·G·D times the keys that spanformer's KV cache holds, up to the farthest that a later query sees

Mechanisms other than a masked softmax over pairs define their own operations and numbers. Each kind's spec
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
"""backward products per forward product of pairs: 5 for 2"""
BESIDE = 2
"""the same for all other matrix products"""
STATE = 4
"""minimum bytes per number of a recurrent state"""
NOTE = 8
"""bytes per number that a KV cache stores about a key, in float64"""


@dataclass(frozen=True)
class Cost:
    """The cost of a mechanism. Functions receive the mechanism's parameters as attributes of `p`."""

    keys: str
    """formula of the number of keys that a query sees far from the edges, or of what is counted instead"""
    pairs: Pairs | None
    """(n, causal, p): pairs of one head, averaged if heads differ; None: no pairs"""
    cached: Callable[[int, Params], float] | None
    """(n, p): keys in a KV cache, averaged if heads differ; None: it needs the whole text and cannot decode"""
    _: KW_ONLY
    assumed: Mapping[str, int] = field(default_factory=dict)
    """quantities that training determines, such as the mean of learned spans, with their assumed defaults"""
    per_pair: int = 4
    """forward operations per pair and number of a head"""
    extra: Callable[[Sizes, Params], int] | None = None
    """forward operations in addition to those of pairs, for one text in one layer"""
    forward: Callable[[Sizes, Params], int] | None = None
    """the same for operations without a gradient, such as hashing"""
    stored: Callable[[int, int, Params], int] | None = None
    """(n, D, p): numbers that one head stores instead of one weight per pair"""
    state: Callable[[int, Params], int] | None = None
    """(D, p): numbers that one query head keeps for decoding instead of keys and values"""
    recurrent: Callable[[int, Params], int] | None = None
    """(D, p): numbers of one KV head's recurrent state, in float32 or wider"""
    codes: Callable[[Params], int] | None = None
    """numbers that the KV cache holds of a key for all heads together, as an index does"""
    recurrent_queries: Callable[[int, Params], int] = lambda d, p: 0
    """(D, p): further numbers of the state for each query head"""
    held: Callable[[Sizes, Params], int] | None = None
    """bytes that decoding keeps of one text in one layer, where they are neither keys and values nor a state alone"""
    noted: bool = False
    """the KV cache also stores one number per key and query head"""
    kept: Callable[[Sizes, Params], activations.Kept] | None = lambda s, p: activations.softmax(s)
    """activations stored for the backward pass; None: not predicted"""
    source: bool = False
    """whether its keys come from another text"""
    alone: Callable[[Params], bool] = lambda p: False
    """whether it computes its output itself and cannot share a layer with other kinds"""


def gates(s: Sizes, p: Params) -> int:
    """One number per token and head, a projection of the hidden state."""
    return 2 * s.rows * s.dim


def query_maps(s: Sizes, p: Params) -> int:
    """Queries times a matrix."""
    return 2 * s.queried * s.head_dim


def every(n: int, p: Params) -> int:
    """Keys in a KV cache that keeps all of them."""
    return n


def up_to_max_span(n: int, p: Params) -> int:
    return p.max_span


@dataclass(frozen=True)
class AttentionCost:
    """The cost of one layer with all its heads, for a whole batch."""

    kind: str
    about: str
    pairs: float | None
    """pairs of one head and one text"""
    keys: float | None
    """mean number of keys that a query sees"""
    flops: int
    """forward"""
    flops_backward: int
    weight_bytes: int
    """bytes of the weights if one is stored per visible pair, or of the state that replaces them"""
    activation_bytes: int | None
    """bytes that spanformer stores for the backward pass: q, k, v, the output, one number per query, and what the
    mechanism adds; None: not predicted (patterns, and mechanisms that spanformer does not implement)"""
    dense_activation_bytes: int
    """the same with the weights of all pairs instead of the output and that number"""
    cache_bytes: int | None
    """bytes of the KV cache or the recurrent state; None: cannot decode"""

    def row(self) -> dict:
        return asdict(self)


def together(kind: str, parts: Sequence[tuple[int, AttentionCost]]) -> AttentionCost:
    """The cost of heads of several kinds in one layer, from (number of heads, their cost)."""
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
    """The cost of a mechanism with these parameters at these sizes; `name` and `about` describe it in tables.

    A mechanism that cannot be causal is counted in both directions.
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
    if cost.held is not None:
        return sizes.times * cost.held(sizes, p)
    if cost.state is not None:
        return sizes.item * sizes.times * sizes.heads * cost.state(sizes.head_dim, p)
    item, state = sizes.item, 0
    if cost.recurrent is not None:  # keys beside a state are as wide
        item = max(sizes.item, STATE)
        numbers = sizes.groups * cost.recurrent(sizes.head_dim, p)
        state = item * sizes.times * (numbers + sizes.heads * cost.recurrent_queries(sizes.head_dim, p))
    keys = cost.cached(sizes.length, p)
    keys = keys if cost.source else min(sizes.length, keys)
    note = NOTE * sizes.times * sizes.heads if cost.noted else 0
    note += item * sizes.times * cost.codes(p) if cost.codes is not None else 0
    return state + int((2 * item * sizes.times * sizes.groups * sizes.head_dim + note) * keys)
