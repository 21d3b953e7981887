"""Activations that spanformer's attention stores for the backward pass of a training step: one function per case.

The functions take the sizes of a layer and then the mechanism's parameters. They do not count the inputs of gates and
projections, which belong to the layer, nor positions, which are a few numbers per token and not per head.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanformer.cost.sizes import Sizes

JOINED = 6
"""float32 numbers per query for merging two parts of a softmax, including the log-sum-exp of the second part"""
TILE = 64, 256
"""queries and keys per tile of additive scores"""
SEGMENT = 256
"""tokens between two stored matrix states"""
AGAIN = 1024
"""tokens of a segment whose features the backward pass computes again"""
LONG = 4096
"""tokens; shorter texts keep their features"""


@dataclass(frozen=True)
class Kept:
    """Numbers stored for the backward pass, for one text in one layer."""

    numbers: float
    """numbers of b bytes"""
    wide: float = 0
    """numbers in float32, for any b"""

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.numbers + other.numbers, self.wide + other.wide)


def softmax(s: Sizes) -> Kept:
    """One softmax over pairs: q, k, v, the output, and the log-sum-exp."""
    return Kept(2 * s.queried + s.keyed, s.rows)


def joined(s: Sizes) -> Kept:
    """Two parts under one softmax: one more output, and the numbers that merge the parts."""
    return softmax(s) + Kept(s.queried, JOINED * s.rows)


def mapped(s: Sizes) -> Kept:
    """The queries before and after the matrix product."""
    return softmax(s) + Kept(s.queried)


def sinks(s: Sizes, first: int) -> Kept:
    """Sink tokens, if any, are a separate part."""
    return joined(s) if first else softmax(s)


def spans(s: Sizes) -> Kept:
    """For each query its span, and the sigmoid that the span is computed from."""
    return softmax(s) + Kept(0, 2 * s.rows)


def expiring(s: Sizes) -> Kept:
    """The same for each key, shared by all heads. (If a few keys expire much later than the others, `attend` computes
    two parts, which cannot be predicted here.)"""
    return softmax(s) + Kept(0, 2 * s.length)


def forgetting(s: Sizes) -> Kept:
    """For each key a gate before and after its sigmoid, and the sum of the log gates up to it."""
    return softmax(s) + Kept(0, 3 * s.rows)


def strided(s: Sizes, step: int) -> Kept:
    return joined(s) + folded(s, step)


def folded(s: Sizes, step: int) -> Kept:
    """In addition to another part, which stores them in text order: q, k and v in the order of residue classes and, for
    several texts, the output once more. For one text of whole classes these are views."""
    whole, several = -(-s.length // step) * step / s.length, s.batch > 1
    return Kept(whole * (s.queried * (1 + several) + s.keyed)) if several or s.length % step else Kept(0)


def longformer(s: Sizes, w: int, g: int, step: int) -> Kept:
    """The window and the global keys are merged; the output is then stored once more, because global queries are
    written into it. Global queries have their own q, k and v, of all tokens or, if causal, of the global tokens. k and
    v of global tokens are also gathered for the other queries, and hidden states for the projections."""
    g = min(g, s.length)
    if not g:
        return softmax(s)
    one, both = g * s.dim, g * 2 * s.groups * s.head_dim  # of q, an output or hidden states; of k and v
    own = both + 2 * one * (s.batch > 1) if s.causal else s.keyed
    found = joined(s) + Kept(s.queried + 3 * one + both + own)
    return found + folded(s, step) if step > 1 else found


def chunked(s: Sizes, queries: int, keys: int) -> Kept:
    """Chunks are recomputed; merging a chunk of keys with the previous ones stores both outputs."""
    more = 0
    for start in range(0, s.length, queries):
        stop = min(start + queries, s.length)
        more += (stop - start) * (-(-(stop if s.causal else s.length) // keys) - 1)
    rows = s.heads * more
    return Kept(s.queried + s.keyed + 2 * s.head_dim * rows, (JOINED - 1) * rows)


def additive(s: Sizes) -> Kept:
    return chunked(s, *TILE)


def bucketed(s: Sizes, rounds: int, *, itself: bool) -> Kept:
    """Queries, which are the keys, values of each query head and the output; and for each round four numbers of 8 bytes
    per token. itself: add what rows without another visible key need."""
    own = Kept(0, 1.25 * s.rows) if itself else Kept(0)
    return Kept(3 * s.queried, s.rows * (1 + 8 * rounds)) + own


def routing(s: Sizes, clusters: int, w: int) -> Kept:
    """Causal: queries before and after their norm, and their distances from the centroids. In an encoder, the same for
    keys, and clusters of w tokens each: their q, k, v and two outputs, with indices of 8 bytes."""
    if s.causal:
        return bucketed(s, 1, itself=False) + Kept(s.queried, 4.25 * s.rows)
    taken = clusters * min(w, s.length)
    return Kept((4 + 5 * taken / s.length) * s.queried, 5.5 * s.rows + 11 * s.heads * taken)


def hard(s: Sizes) -> Kept:
    """q, k and v; scores are computed again."""
    return Kept(s.queried + s.keyed, 0)


def indexed(s: Sizes, keys: int, heads: int, size: int) -> Kept:
    """As of one softmax; the chosen keys, numbers of 4 bytes; and what the index scores by."""
    return softmax(s) + Kept(0, s.length * (min(keys, s.length) + heads * (size + 1) + size))


def cross(s: Sizes, m: int) -> Kept:
    """k and v belong to the m tokens of the other text."""
    return Kept(2 * s.queried + s.keyed * m / s.length, s.rows)


def linear(s: Sizes) -> Kept:
    """As for a softmax, and the states before and after; in both directions also the features."""
    features = 0 if s.causal else s.head_dim * _tokens(s)
    return softmax(s) + Kept(features, _states(s, s.head_dim))


def performer(s: Sizes, m: int, relu: bool) -> Kept:
    """Features, and the inputs of their function: queries and keys, or ReLU's results."""
    if s.causal and s.length > LONG:
        return _made_again(s, m) + Kept(0, 0 if relu else s.rows)
    made_of = m if relu else s.head_dim
    sums = _states(s, m) + s.rows + (0 if relu else s.groups * s.length)
    return Kept(s.queried + s.keyed / 2, (m + made_of) * _tokens(s) + sums)


def rfa(s: Sizes, m: int) -> Kept:
    """Features, vectors before and after normalisation, and their lengths."""
    if s.causal and s.length > LONG:
        return _made_again(s, m)
    return Kept(s.queried + s.keyed / 2, (m + 2 * s.head_dim + 2) * _tokens(s) + _states(s, m) + s.rows)


def gated_rfa(s: Sizes, m: int) -> Kept:
    """The keys' features before their gates, and the gates."""
    again = s.length > LONG
    return rfa(s, m) + Kept(0, (1 if again else m + 4) * s.groups * s.length)


def _made_again(s: Sizes, m: int) -> Kept:
    """Features are not kept; states at the borders of segments are."""
    return softmax(s) + Kept(0, s.groups * m * (s.head_dim + 1) * (1 + -(-s.length // AGAIN)))


def gated_linear(s: Sizes, rank: int) -> Kept:
    """Besides q, k and v: the output's gate, the keys' gates, and states."""
    gates = rank * s.length + s.keyed / 2
    return Kept(s.queried + s.keyed, s.queried + gates + _marks(s))


def gated_delta(s: Sizes, conv: int) -> Kept:
    """The same with one gate for a token and head of keys, and the last inputs of the convolution."""
    tails = max(0, conv - 1) * (s.queried + s.keyed) / s.length
    return Kept(s.queried + s.keyed, s.queried + 6 * s.groups * s.length + tails + _marks(s))


def _marks(s: Sizes) -> float:
    """Numbers of the stored states: the first, and those from which the backward pass recomputes."""
    return s.groups * s.head_dim**2 * (1 + -(-s.length // SEGMENT))


def _tokens(s: Sizes) -> int:
    """Number of queries and keys of all heads."""
    return s.rows + s.groups * s.length


def _states(s: Sizes, m: int) -> int:
    """Numbers of two states."""
    return 2 * s.groups * m * (s.head_dim + 1)


def etc(s: Sizes, radius: int, segment: int, clip: int, hard: int) -> Kept:
    """Long tokens compute l2l, and l2g in two parts by label; global tokens g2g, and g2l in two parts (hard: one). Each
    part has an output, and its own copy of keys that have a label. Labels by distance are one table per batch."""
    m = -(-s.length // segment)
    parts = 2 if hard else 3
    long, top = 3 + 3 + parts - 1, 3 + parts + 2  # q, k, v; outputs; labelled keys
    tables = (2 * radius + 1 + max(2 * m - 1, 1)) * s.dim / s.batch
    shares = 10 * s.length + (3 * parts + 1) * m  # a query's in each of its parts, and what they are computed from
    return Kept(s.dim * (long * s.length + top * m) + tables, s.heads * shares)


def etc_projected(s: Sizes, radius: int, segment: int, clip: int, hard: int) -> Kept:
    """Queries of global tokens, their keys for g2g, and values for all parts but l2l; and the hidden states of both
    kinds of token, copied if there are several texts."""
    m, several = -(-s.length // segment), s.batch > 1
    return etc(s, radius, segment, clip, hard) + Kept(s.dim * ((1 + several) * s.length + (4 + several) * m))
