"""What attention costs, mechanism by mechanism, as arithmetic.

n tokens, H heads and G key/value heads of size D, B texts, P pairs of query and key that one head sees
(`spanformer.cost.pairs`), b bytes a number. A multiply and its add are two operations.

    FLOPs         forward 4·D·P a head (q·k and p·v); a backward pass 10·D·P (q·k again, and into p, q, k, v)
    dense         b·B·H·n²: the weights of an implementation that computes every pair and masks
    weights       b·B·H·P: of one that stores a weight for each pair its pattern sees
    ours          4·B·H·n: one number a query, the log of the softmax's sum; weights are computed again when needed
    activations   what a training step keeps of the operation until its backward pass, q, k, v and the output:
                  b·B·n·D·(2·H + 2·G), and ours; one output more where two parts are joined under one softmax
    cache         2·b·B·G·D times the keys that ours holds on to, up to the farthest that a later query can see

Mechanisms that are no masked softmax over pairs (linear, low_rank) say their own operations and numbers.
A new mechanism is one line of `MECHANISMS`, and one function of `pairs` where its pattern is new.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace

from spanformer.cost import pairs

BACKWARD = 2.5
"""products of a backward pass for each of the forward pass: 5 for 2"""
LSE = 4
"""bytes of the log of a softmax's sum: it is kept in float32"""
NOTE = 8
"""bytes of a number that a cache notes of a key: it is kept in float64"""
JOINED = 6
"""numbers for each query in which two parts of a softmax are joined"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention layer."""

    length: int
    heads: int
    head_dim: int
    kv_heads: int = 0
    """0: as many as heads"""
    batch: int = 1
    item: int = 4
    """bytes of a number"""
    causal: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.name == "kv_heads" else 1
            if each.name != "causal" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{each.name} is {value!r}; expected a whole number, {least} or more")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; expected a number that divides heads, {self.heads}")

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dense_bytes(self) -> int:
        """Weights of every pair."""
        return self.item * self.batch * self.heads * self.length**2

    @property
    def kept_bytes(self) -> int:
        """What our kernel keeps in their place."""
        return LSE * self.batch * self.heads * self.length


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
    """(n, D, …): operations forward of one head beside those of pairs"""
    stored: Callable[..., int] | None = None
    """(n, D, …): numbers one head holds in the place of weights, where they are not one a pair"""
    state: Callable[..., int] | None = None
    """(D, …): numbers one head keeps for decoding in the place of keys and values"""
    noted: bool = False
    """a cache notes one number of each key and query head beside the key"""
    kept: Callable[..., int] | None = None
    """(D, …): numbers for each query of a head that are kept for the backward pass beside q, k, v and the output"""
    apart: bool = False
    """its keys are another text's"""


def _learned(n: int, causal: bool, z: int, ramp: int) -> int:
    return pairs.window(n, causal, z + ramp)


def _every(n: int, *_numbers: int) -> int:
    return n


def _permuted(n: int, blocks: int, size: int, shift: int) -> int:
    """From a block to the one that the permutation sends it to, whichever way."""
    shift %= blocks
    return size * (max(shift, blocks - shift) + 1 if shift else 1)


def _joined(d: int) -> int:
    """Two parts under one softmax: an output more, and what each query's share in either is computed from."""
    return d + JOINED


SINKS = Mechanism(
    "the last w tokens, and the first s", "w + s", {"w": 256, "s": 4}, pairs.sinks, lambda n, w, s: w + s, absent="s",
    kept=lambda d, w, s: _joined(d) if s else 0,
)  # fmt: skip
ETC = Mechanism(
    "r tokens to either side, and a global one for every s, beside the text", "2r + 1 + 2n/s + n/s²",
    {"r": 32, "s": 16, "c": 12, "h": 0}, pairs.etc, None, absent="rch",
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
        absent="z"),
    "expire_span": Mechanism(
        "a token is seen for e more, on average and S at most, and a ramp R", "e + R", {"e": 256, "R": 32, "S": 1024},
        lambda n, causal, e, ramp, most: _learned(n, causal, e, ramp), lambda n, e, ramp, most: most + ramp,
        absent="e", noted=True),
    "forgetting": Mechanism(
        "every earlier token, fading by the gates between", "n", {}, pairs.full, _every, noted=True),
    "sinks": SINKS,
    "sink_window": SINKS,
    "sink_span": Mechanism(
        "spans learned by head, z on average and a ramp R, and the first s tokens", "z + R + s",
        {"s": 4, "z": 256, "R": 32}, lambda n, causal, s, z, ramp: pairs.sinks(n, causal, z + ramp, s),
        lambda n, s, z, ramp: s + z + ramp, absent="sz", kept=lambda d, s, z, ramp: _joined(d) if s else 0),
    "dilated": Mechanism(
        "w tokens, s apart", "w", {"w": 256, "s": 4}, pairs.dilated, lambda n, w, s: (w - 1) * s + 1),
    "strided": Mechanism(
        "the last l tokens, and every l-th before", "l + n/l", {"l": 64}, pairs.strided, _every,
        kept=lambda d, step: _joined(d)),
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
        lambda n, w, g, s: (w - 1) * s + 1 + g, absent="g"),
    "big_bird": Mechanism(
        "blocks of b: k near, the first g, r at random", "(k + g + r)·b", {"b": 64, "k": 3, "g": 2, "r": 3},
        pairs.big_bird, _every, absent="gr"),
    "random": Mechanism("r tokens drawn for each", "r", {"r": 64}, pairs.random, _every),
    "etc": ETC,
    "etc_apart": replace(ETC, about=ETC.about + ", with projections of their own"),
    "chunked": Mechanism(
        "every earlier token, c queries at a time", "n", {"c": 512}, lambda n, causal, c: pairs.full(n, causal),
        _every, stored=lambda n, d, c: min(n, c) * n),
    "dot": Mechanism("every earlier token, scored by q·k", "n", {}, pairs.full, _every),
    "general": Mechanism(
        "every earlier token, scored by q·W·k", "n", {}, pairs.full, _every, extra=lambda n, d: 2 * n * d * d,
        kept=lambda d: d),
    "bilinear": Mechanism(
        "every earlier token, scored by (q·W + w)·k", "n", {}, pairs.full, _every, extra=lambda n, d: 2 * n * d * d,
        kept=lambda d: d),
    "additive": Mechanism(
        "every earlier token, scored by v·tanh(W·q + U·k)", "n", {}, pairs.full, _every, per_pair=6,
        extra=lambda n, d: 4 * n * d * d),
    "cross": Mechanism(
        "all m tokens of another text", "m", {"m": 512}, lambda n, causal, m: n * m, lambda n, m: m, apart=True),
    "linear": Mechanism(
        "f features: a state in the place of weights", "4·n·f·D", {"f": 64}, None, lambda n, f: 0,
        extra=lambda n, d, f: 4 * n * f * d, stored=lambda n, d, f: f * (d + 1), state=lambda d, f: f * (d + 1)),
    "low_rank": Mechanism(
        "keys and values projected along the text to r", "8·n·r·D", {"r": 256}, None, None,
        extra=lambda n, d, r: 8 * n * r * d, stored=lambda n, d, r: n * r),
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
    activation_bytes: int
    """what the operation keeps for its backward pass, as ours does: q, k, v, the output, one number a query, and what
    the mechanism needs beside"""
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
    n, d, causal = sizes.length, sizes.head_dim, sizes.causal and mechanism.cached is not None
    seen = None if mechanism.pairs is None else mechanism.pairs(n, causal, *numbers)
    flops = mechanism.per_pair * d * (seen or 0) + (mechanism.extra(n, d, *numbers) if mechanism.extra else 0)
    held = seen if mechanism.stored is None else mechanism.stored(n, d, *numbers)
    assert held is not None
    every, b = sizes.batch * sizes.heads, sizes.item
    total = int(every * flops)
    inputs = b * sizes.batch * n * d * (sizes.heads + 2 * sizes.groups)
    kept = d + (mechanism.kept(d, *numbers) if mechanism.kept else 0)
    return AttentionCost(
        kind=":".join([kind.split(":")[0], *map(str, numbers)]),
        about=mechanism.about,
        pairs=seen,
        keys=None if seen is None else seen / n,
        flops=total,
        flops_backward=int(total * BACKWARD),
        weight_bytes=int(b * every * held),
        activation_bytes=inputs + b * every * n * kept + sizes.kept_bytes,
        dense_activation_bytes=inputs + sizes.dense_bytes,
        cache_bytes=_cache(mechanism, numbers, sizes),
    )


def _cache(mechanism: Mechanism, numbers: list[int], sizes: Sizes) -> int | None:
    if mechanism.cached is None:
        return None
    if mechanism.state is not None:
        return sizes.item * sizes.batch * sizes.heads * mechanism.state(sizes.head_dim, *numbers)
    keys = mechanism.cached(sizes.length, *numbers)
    keys = keys if mechanism.apart else min(sizes.length, keys)
    note = NOTE * sizes.batch * sizes.heads if mechanism.noted else 0
    return int((2 * sizes.item * sizes.batch * sizes.groups * sizes.head_dim + note) * keys)
