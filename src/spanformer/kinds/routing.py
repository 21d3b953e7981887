"""Spec of routing attention."""

from types import SimpleNamespace

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    """Of clusters of one size; in an encoder each takes `window` queries and keys."""
    return pairs.buckets(n, p.clusters, p.window, itself=True) if causal else p.clusters * min(n, p.window) ** 2


KIND = Kind(
    "routing",
    "the last `window` tokens of its cluster, one of `clusters`",
    "spanformer.attention.routing:Routing.build",
    params={"window": INHERIT, "clusters": 16, "commitment": 1e-4},
    cost=Cost(
        "window",
        _pairs,
        lambda n, p: n,
        forward=lambda s, p: 2 * s.queried * p.clusters,
        state=lambda d, p: pairs.ring_numbers(d, p.clusters, p.window, 1),
        kept=lambda s, p: activations.routing(s, p.clusters, p.window),
    ),
    zero=("commitment",),
    drawn="2 routing(6, 4)",
    timed="routing(64, 64)",
    tested=("routing(40, 4)",),
)
