"""Spec of low-rank attention for language models."""

from types import SimpleNamespace

from spanformer.cost import activations
from spanformer.cost.activations import Kept
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    whole, rest = divmod(n, p.size)
    own = whole * p.size * (p.size + 1) // 2 + rest * (rest + 1) // 2
    most = p.max_span // p.size - 1
    return own + sum(min(b, most) * (p.size if b < whole else rest) for b in range(whole + (rest > 0)))


def _convolution(s: Sizes, p: SimpleNamespace) -> int:
    return 2 * s.keyed if p.project == "convolution" else 0


def _kept(s: Sizes, p: SimpleNamespace) -> Kept:
    """Both parts, joined, the pooled keys and values and, unless they are means, what they were pooled of."""
    pooled = 2 * s.groups * -(-s.length // p.size) * s.head_dim
    return activations.joined(s) + Kept(pooled + (0 if p.project == "mean" else s.keyed + pooled))


KIND = Kind(
    "low_rank",
    "the own block of `size` tokens, and one pooled key of each finished block before it",
    "spanformer.attention.low_rank:LowRank.build",
    params={"size": 64, "max_span": INHERIT, "project": "mean"},
    choices={"project": ("mean", "max", "convolution")},
    cost=Cost(
        "size/2 + max_span/size",
        _pairs,
        lambda n, p: p.size + p.max_span // p.size - 1,
        extra=_convolution,
        kept=_kept,
        alone=lambda p: True,
    ),
    drawn="low_rank(8)",
    timed="low_rank(64)",
    tested=("low_rank(5)", "low_rank(4, 23, max)", "low_rank(5, 20, convolution)"),
)
