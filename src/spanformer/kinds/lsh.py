"""Spec of LSH attention."""

from types import SimpleNamespace

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind

RAMP = 32
"""ranks beyond a learned span that a ring holds, as the [model.attention] section has them by default"""


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    """Of buckets of one size, without pairs that several rounds have in common."""
    return p.rounds * pairs.buckets(n, p.buckets, p.window, itself=False)


def _hash(s: Sizes, p: SimpleNamespace) -> int:
    """Products with rotations, half as many as buckets or as the two factors of their number."""
    columns = p.buckets if p.buckets <= 128 else sum(pairs.even_factors(p.buckets))
    return s.queried * p.rounds * columns


KIND = Kind(
    "lsh",
    "the last `window` tokens of its bucket, in any of `rounds` (LSH)",
    "spanformer.attention.lsh:LSH.build",
    params={
        "window": INHERIT,
        "buckets": 64,
        "rounds": 4,
        "learned": False,
        "chunked": False,
    },
    cost=Cost(
        "rounds·window",
        _pairs,
        lambda n, p: n,
        forward=_hash,
        state=lambda d, p: pairs.ring_numbers(d, p.buckets, p.window + p.learned * RAMP, p.rounds),
        kept=lambda s, p: activations.bucketed(s, p.rounds, itself=True),
        alone=lambda p: p.chunked,
    ),
    drawn="2 lsh(6, 4, 1)",
    timed="lsh(128, 64, 4)",
    tested=("lsh(5, 4, 3)",),
)
