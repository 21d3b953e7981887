"""Spec of attention over the keys that an index chooses."""

from types import SimpleNamespace

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, up_to_max_span
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    """The chosen ones: all in reach, up to `keys`."""
    if not causal:
        return n * min(n, p.keys) if p.max_span >= n else sum(
            min(p.keys, min(n, i + p.max_span) - max(0, i - p.max_span + 1)) for i in range(n)
        )  # fmt: skip
    return pairs.window(n, True, min(p.keys, p.max_span))


def _products(p: SimpleNamespace) -> int:
    """Numbers that an index multiplies for each pair it scores."""
    return p.index_heads * (p.index_dim + 1)


def _index(s: Sizes, p: SimpleNamespace) -> int:
    """Scores of all keys in reach, without gradient; and half of the projections, see `_taught`."""
    return 2 * _products(p) * pairs.window(s.length, s.causal, p.max_span) + _projections(s, p) // 2


def _projections(s: Sizes, p: SimpleNamespace) -> int:
    return 2 * s.length * s.dim * (_products(p) + p.index_dim)


def _taught(s: Sizes, p: SimpleNamespace) -> int:
    """Scores of chosen keys once more, for the KL; and the other half of the projections: there is no gradient into
    hidden states, so a backward pass has them once and not twice."""
    again = 2 * _products(p) * _pairs(s.length, s.causal, p) if p.kl else 0
    return again + _projections(s, p) - _projections(s, p) // 2


KIND = Kind(
    "indexed",
    "the `keys` tokens up to max_span that an index ranks highest",
    "spanformer.attention.indexed:Indexed.build",
    params={
        "keys": 64, "max_span": INHERIT, "index_heads": 4, "index_dim": 16, "learned": False, "kl": 1.0,
    },
    cost=Cost(
        "keys",
        _pairs,
        up_to_max_span,
        extra=_taught,
        forward=_index,
        codes=lambda p: p.index_dim,
        kept=lambda s, p: activations.indexed(s, p.keys, p.index_heads, p.index_dim),
    ),
    zero=("kl",),
    drawn="indexed(6)",
    timed="indexed(64)",
    tested=("indexed(7)", "indexed(6, learned=true)"),
)  # fmt: skip
