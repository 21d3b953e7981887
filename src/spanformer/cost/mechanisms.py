"""What attention costs, mechanism by mechanism, as arithmetic.

n tokens, H heads and G key/value heads of size D, B texts, P pairs of query and key that one head sees
(`spanformer.cost.pairs`), b bytes a number. A multiply and its add are two operations.

    FLOPs         forward 4·D·P a head (q·k and p·v); a backward pass 10·D·P (q·k again, and into p, q, k, v). Products
                  that a mechanism has beside (mapped queries, gates, projections of its own) are added, and twice as
                  many in a backward pass. It is the least: what the mechanism asks for, without what blocks overhang
    dense         b·B·H·n²: the weights of an implementation that computes every pair and masks
    weights       b·B·H·P: of one that stores a weight for each pair its pattern sees
    ours          4·B·H·n: one number a query, the log of the softmax's sum; weights are computed again when needed
    activations   what a training step keeps of the operation until its backward pass, q, k, v and the output:
                  b·B·n·D·(2·H + 2·G), and ours; one output more where two parts are joined under one softmax, and what
                  else the functions of `activations` say. Hidden states that gates and projections read are the layer's
    cache         2·b·B·G·D times the keys that ours holds on to, up to the farthest that a later query can see

Mechanisms that are no masked softmax over pairs (linear, low_rank) say their own operations and numbers.
A new mechanism is one line of `MECHANISMS`, and one function of `pairs` where its pattern is new.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace

from spanformer.cost import activations, pairs
from spanformer.cost.sizes import LSE, Sizes

BACKWARD = 2.5
"""products of a backward pass for each of the forward pass: 5 for 2"""
BESIDE = 2
"""the same of products that are not of pairs, as those of any matrix"""
NOTE = 8
"""bytes of a number that a cache notes of a key: it is kept in float64"""


@dataclass(frozen=True)
class Mechanism:
    """Its functions take the text's length and then the mechanism's own numbers, in the order of `numbers`."""

    about: str
    formula: str
    """of the keys a query sees far from the edges, or of what else is counted"""
    numbers: dict[str, int]
    """what it takes, with what is meant when it is not given"""
    pairs: Callable[..., float] | None
    """(n, causal, …): pairs of one head, on average where heads differ; None: it has none"""
    cached: Callable[..., float] | None
    """(n, …): keys that a cache holds, on average where heads differ; None: it reads a text whole, and decodes
    nothing"""
    _: KW_ONLY
    absent: str = ""
    """which of its numbers may be 0"""
    per_pair: int = 4
    """operations forward for each pair and number of a head"""
    extra: Callable[..., int] | None = None
    """(sizes, …): operations forward beside those of pairs, of one text in one layer"""
    stored: Callable[..., int] | None = None
    """(n, D, …): numbers one head holds in the place of weights, where they are not one a pair"""
    state: Callable[..., int] | None = None
    """(D, …): numbers one head keeps for decoding in the place of keys and values"""
    noted: bool = False
    """a cache notes one number of each key and query head beside the key"""
    kept: Callable[..., activations.Kept] | None = activations.softmax
    """(sizes, …): what is kept for the backward pass; None: not predicted"""
    apart: bool = False
    """its keys are another text's"""
    alone: Callable[..., bool] = lambda *_numbers: False
    """(…): whether it mixes values in its own way, and shares a layer with no other kind"""


def _learned(n: int, causal: bool, z: int, ramp: int) -> int:
    return pairs.window(n, causal, z + ramp)


def _alone(*_numbers: int) -> bool:
    return True


def _every(n: int, *_numbers: int) -> int:
    return n


def _permuted(n: int, blocks: int, size: int, shift: int) -> int:
    """From a block to the one that the permutation sends it to, whichever way."""
    shift %= blocks
    return size * (max(shift, blocks - shift) + 1 if shift else 1)


def _gates(s: Sizes, *_numbers: int) -> int:
    """A number of each token and head, read off the hidden state."""
    return 2 * s.rows * s.dim


def _maps(s: Sizes) -> int:
    """Queries times a matrix."""
    return 2 * s.queried * s.head_dim


def _projections(s: Sizes, w: int, g: int, step: int) -> int:
    """Of global queries, and of all tokens as their keys and values, where causal of the global ones."""
    g = min(g, s.length)
    seen = (g if s.causal else s.length) if g else 0
    return 2 * s.dim * (g * s.dim + seen * 2 * s.groups * s.head_dim)


def _apart(s: Sizes, radius: int, segment: int, clip: int, hard: int) -> int:
    """Queries, keys and values of global tokens, and keys and values of all for these."""
    return 2 * s.dim * s.dim * (5 * -(-s.length // segment) + 2 * s.length)


SINKS = Mechanism(
    "the last w tokens, and the first s", "w + s", {"w": 256, "s": 4}, pairs.sinks, lambda n, w, s: w + s, absent="s",
    kept=lambda sizes, w, s: activations.sinks(sizes, s),
)  # fmt: skip
ETC = Mechanism(
    "r tokens to either side, and a global one for every s, beside the text", "2r + 1 + 2n/s + n/s²",
    {"r": 32, "s": 16, "c": 12, "h": 0}, pairs.etc, None, absent="rch", kept=activations.etc,
    alone=_alone,
)  # fmt: skip
MECHANISMS: dict[str, Mechanism] = {
    "full": Mechanism("every earlier token", "n", {}, pairs.full, _every),
    "window": Mechanism("the last w tokens", "w", {"w": 256}, pairs.window, lambda n, w: w),
    "adaptive_span": Mechanism(
        "spans learned by head, z on average, and a ramp R", "z + R", {"z": 256, "R": 32}, _learned,
        lambda n, z, ramp: z + ramp, absent="z"),
    "dynamic_span": Mechanism(
        "spans chosen by token, z on average and S at most, and a ramp R", "z + R", {"z": 256, "R": 32, "S": 1024},
        lambda n, causal, z, ramp, most: _learned(n, causal, z, ramp), lambda n, z, ramp, most: most + ramp,
        absent="z", extra=_gates, kept=activations.spans),
    "expire_span": Mechanism(
        "a token is seen for e more, on average and S at most, and a ramp R", "e + R", {"e": 256, "R": 32, "S": 1024},
        lambda n, causal, e, ramp, most: _learned(n, causal, e, ramp), lambda n, e, ramp, most: most + ramp,
        absent="e", noted=True, extra=lambda s, *numbers: 2 * s.length * s.dim,
        kept=activations.expiring),
    "forgetting": Mechanism(
        "every earlier token, fading by the gates between", "n", {}, pairs.full, _every, noted=True, extra=_gates,
        kept=activations.forgetting),
    "sinks": SINKS,
    "sink_window": SINKS,
    "sink_span": Mechanism(
        "spans learned by head, z on average and a ramp R, and the first s tokens", "z + R + s",
        {"s": 4, "z": 256, "R": 32}, lambda n, causal, s, z, ramp: pairs.sinks(n, causal, z + ramp, s),
        lambda n, s, z, ramp: s + z + ramp, absent="sz",
        kept=lambda sizes, s, z, ramp: activations.sinks(sizes, s)),
    "dilated": Mechanism(
        "w tokens, s apart", "w", {"w": 256, "s": 4}, pairs.dilated, lambda n, w, s: (w - 1) * s + 1),
    "strided": Mechanism(
        "the last l tokens, and every l-th before", "l + n/l", {"l": 64}, pairs.strided, _every,
        kept=activations.strided),
    "fixed": Mechanism(
        "a block of l, and the last c of every block before", "l/2 + c·n/2l", {"l": 64, "c": 8}, pairs.fixed,
        _every, absent="c"),
    "strided_heads": Mechanism(
        "the last l tokens in half of the heads, every l-th in the others", "(l + n/l) / 2", {"l": 64},
        pairs.strided_heads, lambda n, step: (min(n, step + 1) + n) / 2),
    "fixed_heads": Mechanism(
        "a block of l in half of the heads, the last c of every block in the others", "(l/2 + c·n/2l) / 2",
        {"l": 64, "c": 8}, pairs.fixed_heads, lambda n, size, c: (min(n, size) + n) / 2),
    "blockwise": Mechanism(
        "one of k blocks of l, by a permutation (here: the s-th before)", "l", {"k": 4, "l": 64, "s": 0},
        pairs.blockwise, _permuted, absent="s"),
    "image_1d": Mechanism(
        "a block of l, and m tokens before it", "l/2 + m", {"l": 256, "m": 256}, pairs.image_1d,
        lambda n, size, m: size + m, absent="m"),
    "image_2d": Mechanism(
        "h × w pixels of x a line, a lines above and c columns beside", "h·w/2 + a·(w + 2c) + h·c",
        {"x": 64, "h": 8, "w": 8, "a": 8, "c": 8}, pairs.image_2d,
        lambda n, x, h, w, a, c: (-(-a // h) * (x // w) + -(-c // w) + 1) * h * w, absent="ac"),
    "longformer": Mechanism(
        "the last w tokens, s apart, and g global ones", "w + g", {"w": 256, "g": 16, "s": 1}, pairs.longformer,
        lambda n, w, g, s: (w - 1) * s + 1 + g, absent="g", extra=_projections, kept=activations.longformer,
        alone=lambda w, g, s: g > 0),
    "big_bird": Mechanism(
        "blocks of b: k near, the first g, r at random", "(k + g + r)·b", {"b": 64, "k": 3, "g": 2, "r": 3},
        pairs.big_bird, _every, absent="gr"),
    "random": Mechanism("r tokens drawn for each", "r", {"r": 64}, pairs.random, _every),
    "etc": ETC,
    "etc_apart": replace(
        ETC, about=ETC.about + ", with projections of their own", extra=_apart, kept=activations.etc_apart),
    "chunked": Mechanism(
        "every earlier token, c queries and k keys at a time", "n", {"c": 256, "k": 1024},
        lambda n, causal, c, k: pairs.full(n, causal), _every, stored=lambda n, d, c, k: min(n, c) * min(n, k),
        kept=activations.chunked, alone=_alone),
    "dot": Mechanism("every earlier token, scored by q·k", "n", {}, pairs.full, _every),
    "general": Mechanism(
        "every earlier token, scored by q·W·k", "n", {}, pairs.full, _every, extra=_maps, kept=activations.mapped),
    "bilinear": Mechanism(
        "every earlier token, scored by (q·W + w)·k", "n", {}, pairs.full, _every, extra=_maps,
        kept=activations.mapped),
    "additive": Mechanism(
        "every earlier token, scored by v·tanh(W·q + U·k)", "n", {}, pairs.full, _every, per_pair=6,
        extra=lambda s: _maps(s) + s.keyed * s.head_dim, kept=activations.additive, alone=_alone),
    "cross": Mechanism(
        "all m tokens of another text", "m", {"m": 512}, lambda n, causal, m: n * m, lambda n, m: m, apart=True,
        kept=activations.cross, alone=_alone),
    "linear": Mechanism(
        "f features: a state in the place of weights", "4·n·f·D", {"f": 64}, None, lambda n, f: 0,
        extra=lambda s, f: 4 * f * s.queried, kept=None, stored=lambda n, d, f: f * (d + 1),
        state=lambda d, f: f * (d + 1), alone=_alone),
    "low_rank": Mechanism(
        "keys and values projected along the text to r", "8·n·r·D", {"r": 256}, None, None,
        extra=lambda s, r: 8 * r * s.queried, kept=None, stored=lambda n, d, r: n * r, alone=_alone),
}  # fmt: skip
"""by the name that a run file's `kind` has"""


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


def find(kind: str) -> tuple[Mechanism, list[int]]:
    """A mechanism and its numbers, from "window:128", "big_bird:64:3:2:3" or a bare name."""
    name, *given = kind.split(":")
    if name not in MECHANISMS:
        near = difflib.get_close_matches(name, MECHANISMS, 1)
        meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(MECHANISMS)}"
        raise ValueError(f"there is no mechanism {name!r}; {meant}")
    mechanism = MECHANISMS[name]
    shape = ":".join([name, *mechanism.numbers])
    if len(given) > len(mechanism.numbers) or not all(text.isascii() and text.isdigit() for text in given):
        raise ValueError(f"{kind!r} cannot be read; expected {shape}, with whole numbers")
    numbers = [int(text) for text in given] + list(mechanism.numbers.values())[len(given) :]
    if name == "image_2d" and numbers[2] and numbers[0] % numbers[2]:
        raise ValueError(f"x in {kind!r} is {numbers[0]}; expected a multiple of w, {numbers[2]}")
    for letter, number in zip(mechanism.numbers, numbers, strict=True):
        if not number and letter not in mechanism.absent:
            raise ValueError(f"{letter} in {kind!r} is 0; expected at least 1 ({shape})")
    return mechanism, numbers


def attention_cost(kind: str, sizes: Sizes) -> AttentionCost:
    """What a mechanism costs at these sizes. One that cannot be causal is counted as it is, in both directions."""
    mechanism, numbers = find(kind)
    return cost_of(":".join([kind.split(":")[0], *map(str, numbers)]), mechanism, numbers, sizes)


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


def cost_of(name: str, mechanism: Mechanism, numbers: list[int], sizes: Sizes) -> AttentionCost:
    n, d, causal = sizes.length, sizes.head_dim, sizes.causal and mechanism.cached is not None
    seen = None if mechanism.pairs is None else mechanism.pairs(n, causal, *numbers)
    own = mechanism.extra(sizes, *numbers) if mechanism.extra else 0
    flops = mechanism.per_pair * sizes.heads * d * (seen or 0)
    held = seen if mechanism.stored is None else mechanism.stored(n, d, *numbers)
    assert held is not None
    kept = None if mechanism.kept is None else mechanism.kept(sizes, *numbers)
    keys = mechanism.cached(n, *numbers) if mechanism.apart and mechanism.cached else n
    times, b = sizes.times, sizes.item
    dense = sizes.queried + sizes.keyed * keys / n + sizes.rows * keys
    return AttentionCost(
        kind=name,
        about=mechanism.about,
        pairs=seen,
        keys=None if seen is None else seen / n,
        flops=int(times * (flops + own)),
        flops_backward=int(times * (BACKWARD * flops + BESIDE * own)),
        weight_bytes=int(b * times * sizes.heads * held),
        activation_bytes=None if kept is None else round(times * (b * kept.numbers + LSE * kept.wide)),
        dense_activation_bytes=round(b * times * dense),
        cache_bytes=_cache(mechanism, numbers, sizes),
    )


def _cache(mechanism: Mechanism, numbers: list[int], sizes: Sizes) -> int | None:
    if mechanism.cached is None:
        return None
    if mechanism.state is not None:
        return sizes.item * sizes.times * sizes.heads * mechanism.state(sizes.head_dim, *numbers)
    keys = mechanism.cached(sizes.length, *numbers)
    keys = keys if mechanism.apart else min(sizes.length, keys)
    note = NOTE * sizes.times * sizes.heads if mechanism.noted else 0
    return int((2 * sizes.item * sizes.times * sizes.groups * sizes.head_dim + note) * keys)
