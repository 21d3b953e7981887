"""Spec of Sinkhorn attention."""

from types import SimpleNamespace

from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    """Own block and matched block. In a decoder the first block of a stretch of max_span tokens has no match."""
    size, (whole, rest) = p.size, divmod(n, p.size)
    if not causal:
        return whole * size**2 + rest**2 + n * min(n, size)
    stretch = max(1, p.max_span // size) * size
    own = whole * size * (size + 1) // 2 + rest * (rest + 1) // 2
    return own + size * sum(max(0, min(n - first, stretch) - size) for first in range(0, n, stretch))


def _match(s: Sizes, p: SimpleNamespace) -> int:
    """FLOPs of the scores of blocks, and of matched keys and values with the weight that they have."""
    blocks = -(-s.length // p.size)
    return 2 * s.groups * blocks**2 * (s.head_dim + p.size * (2 * s.head_dim + 1))


KIND = Kind(
    "sinkhorn",
    "the own block of `size` tokens and one matched to it; weak in a decoder, where its first token alone chooses",
    "spanformer.attention.sinkhorn:Sinkhorn.build",
    params={"size": 64, "max_span": INHERIT, "iterations": 8, "temperature": 0.75, "noise": 0.0},
    zero=("temperature", "noise"),
    cost=Cost(
        "2·size",
        _pairs,
        lambda n, p: n,
        extra=_match,
        kept=None,
        alone=lambda p: True,
    ),
    drawn="sinkhorn(8)",
    timed="sinkhorn(128)",
    tested=("sinkhorn(5)", "sinkhorn(7, 14, 3)"),
)
