"""Activations that spanformer's attention keeps for the backward pass of a training step: one function per case.

The functions take the sizes of a layer and then the mechanism's parameters. The inputs of gates and projections belong
to the layer and are not counted. Neither are positions: a few numbers per token, not per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanformer.cost.sizes import Sizes

JOINED = 6
"""float32 numbers for each query in which two parts of a softmax are joined, the second's log of its sum among them"""
TILE = 64, 256
"""queries and keys per tile of additive scores"""
SEGMENT = 256
"""tokens from one matrix state that is kept to the next"""


@dataclass(frozen=True)
class Kept:
    """Numbers that are kept for the backward pass, of one text in one layer."""

    numbers: float
    """of b bytes"""
    wide: float = 0
    """in float32, for any b"""

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.numbers + other.numbers, self.wide + other.wide)


def softmax(s: Sizes) -> Kept:
    """One softmax over pairs: q, k, v, the output, and the log of the softmax's sum."""
    return Kept(2 * s.queried + s.keyed, s.rows)


def joined(s: Sizes) -> Kept:
    """Two parts under one softmax: an output more, and what each query's share in either is computed from."""
    return softmax(s) + Kept(s.queried, JOINED * s.rows)


def mapped(s: Sizes) -> Kept:
    """The queries before they are mapped, and after."""
    return softmax(s) + Kept(s.queried)


def sinks(s: Sizes, first: int) -> Kept:
    """Sink tokens, if there are any, are a separate part."""
    return joined(s) if first else softmax(s)


def spans(s: Sizes) -> Kept:
    """For each query the span it chose, and the sigmoid it was made by."""
    return softmax(s) + Kept(0, 2 * s.rows)


def expiring(s: Sizes) -> Kept:
    """The same for each key, shared by all heads. (If a few keys last far longer than the others, `attend` computes
    two parts, which cannot be predicted here.)"""
    return softmax(s) + Kept(0, 2 * s.length)


def forgetting(s: Sizes) -> Kept:
    """For each key a gate before and after its sigmoid, and what was forgotten up to it."""
    return softmax(s) + Kept(0, 3 * s.rows)


def strided(s: Sizes, step: int) -> Kept:
    return joined(s) + folded(s, step)


def folded(s: Sizes, step: int) -> Kept:
    """Beside another part, which keeps them as they are: q, k and v in the order of residue classes, and the output in
    the other order. They are views where one text fills its classes."""
    whole, several = -(-s.length // step) * step / s.length, s.batch > 1
    return Kept(whole * (s.queried * (1 + several) + s.keyed)) if several or s.length % step else Kept(0)


def longformer(s: Sizes, w: int, g: int, step: int) -> Kept:
    """The window and the global keys are joined; then the output is kept once more, as global queries are
    written into it. Global queries have q, k and v of their own, of all tokens or, where causal, of the global ones;
    k and v are also taken out for the others, and hidden states for the projections."""
    g = min(g, s.length)
    if not g:
        return softmax(s)
    one, both = g * s.dim, g * 2 * s.groups * s.head_dim  # of q, an output or hidden states; of k and v
    own = both + 2 * one * (s.batch > 1) if s.causal else s.keyed
    found = joined(s) + Kept(s.queried + 3 * one + both + own)
    return found + folded(s, step) if step > 1 else found


def chunked(s: Sizes, queries: int, keys: int) -> Kept:
    """Chunks are computed again; joining a chunk of keys to those before it keeps both outputs."""
    more = 0
    for start in range(0, s.length, queries):
        stop = min(start + queries, s.length)
        more += (stop - start) * (-(-(stop if s.causal else s.length) // keys) - 1)
    rows = s.heads * more
    return Kept(s.queried + s.keyed + 2 * s.head_dim * rows, (JOINED - 1) * rows)


def additive(s: Sizes) -> Kept:
    return chunked(s, *TILE)


def bucketed(s: Sizes, rounds: int, *, keys: int, itself: bool) -> Kept:
    """Queries, values and output as of one softmax, `keys` numbers for each of q in the place of keys, values of each
    query head; and for each round four numbers of 8 bytes a token. Itself: what rows that see nothing else need."""
    own = Kept(0, 3 * s.rows) if itself else Kept(0)
    return Kept((3 + keys) * s.queried, s.rows * (1 + 8 * rounds)) + own


def routing(s: Sizes, clusters: int, w: int) -> Kept:
    """Causal: queries before and after their norm, and how far they are from their centroids. In an encoder keys have
    the same, and clusters take w tokens each: q, k, v and two outputs of theirs, with indices of 8 bytes."""
    if s.causal:
        return bucketed(s, 1, keys=1, itself=False) + Kept(s.queried, 2.5 * s.rows)
    taken = clusters * min(w, s.length)
    return Kept((4 + 5 * taken / s.length) * s.queried, 5.5 * s.rows + 11 * s.heads * taken)


def cross(s: Sizes, m: int) -> Kept:
    """k and v are of the other text's m tokens."""
    return Kept(2 * s.queried + s.keyed * m / s.length, s.rows)


def linear(s: Sizes) -> Kept:
    """As a softmax, and the states before and after; in both directions also the features."""
    features = 0 if s.causal else s.head_dim * _tokens(s)
    return softmax(s) + Kept(features, _states(s, s.head_dim))


def retention(s: Sizes) -> Kept:
    """The decay of every key, and what each output was divided by."""
    return linear(s) + Kept(0, s.rows + s.groups * s.length)


def performer(s: Sizes, m: int, relu: bool) -> Kept:
    """Features, and what they are made of: the queries and keys, or ReLU's results."""
    made_of = m if relu else s.head_dim
    sums = _states(s, m) + 2 * s.rows + s.groups * s.length
    return Kept(s.queried + s.keyed / 2, (m + made_of) * _tokens(s) + sums)


def rfa(s: Sizes, m: int) -> Kept:
    """Features, angles, vectors before and after they get length 1, and their lengths."""
    return Kept(
        s.queried + s.keyed / 2, (m + m // 2 + 2 * s.head_dim + 2) * _tokens(s) + _states(s, m) + 2 * s.rows
    )  # fmt: skip


def gated_rfa(s: Sizes, m: int) -> Kept:
    """The keys' features before their gates, and the gates."""
    return rfa(s, m) + Kept(0, (m + 4) * s.groups * s.length)


def gated_linear(s: Sizes, rank: int) -> Kept:
    """Beside q, k and v: the output before and after its norm and its gate, the keys' gates, and states."""
    gates = rank * s.length + 3 * s.keyed / 2
    return Kept(s.queried + s.keyed, 5 * s.queried + s.rows + gates + _marks(s))


def gated_delta(s: Sizes, conv: int) -> Kept:
    """The same, and q, k and v before SiLU and before their norms, and once more where a convolution comes first."""
    inputs = s.queried + s.keyed
    gates = 3 * s.rows + 6 * s.groups * s.length
    convolved = inputs + 2 * (conv - 1) * inputs / s.length if conv else 0
    return Kept(0, 8 * s.queried + 5 * s.keyed / 2 + gates + convolved + _marks(s))


def _marks(s: Sizes) -> float:
    """Numbers of states: the first, and those that a backward pass starts over from."""
    return s.groups * s.head_dim**2 * (1 + -(-s.length // SEGMENT))


def _tokens(s: Sizes) -> int:
    """Queries and keys of all heads."""
    return s.rows + s.groups * s.length


def _states(s: Sizes, m: int) -> int:
    """Numbers of two states."""
    return 2 * s.groups * m * (s.head_dim + 1)


def etc(s: Sizes, radius: int, segment: int, clip: int, hard: int) -> Kept:
    """Long tokens see l2l, and l2g in two parts by their label; global ones g2g, and g2l in two or, if hard, one. Each
    part has an output, and where keys have a label their own copy; labels by distance are one table for a batch."""
    m = -(-s.length // segment)
    parts = 2 if hard else 3
    long, top = 3 + 3 + parts - 1, 3 + parts + 2  # q, k, v; outputs; labelled keys
    tables = (2 * radius + 1 + max(2 * m - 1, 1)) * s.dim / s.batch
    shares = 10 * s.length + (3 * parts + 1) * m  # a query's in each of its parts, and what they are computed from
    return Kept(s.dim * (long * s.length + top * m) + tables, s.heads * shares)


def etc_projected(s: Sizes, radius: int, segment: int, clip: int, hard: int) -> Kept:
    """Queries of global tokens, their keys for g2g and values for all but l2l; and hidden states of both, taken apart
    where there are several texts."""
    m, several = -(-s.length // segment), s.batch > 1
    return etc(s, radius, segment, clip, hard) + Kept(s.dim * ((1 + several) * s.length + (4 + several) * m))
