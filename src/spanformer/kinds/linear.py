"""Specs of linear attention: heads whose past is a sum of fixed size.

Per query head and token, chunks of c tokens with m features cost (c + 1)·(m + D) for the pairs in the chunk and 2·m·D
for what the state adds, and per KV head 2·m·D to advance the state; in both directions there are no chunks.
"""

from collections.abc import Callable
from types import SimpleNamespace

from spanformer.cost import activations
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind

Params = SimpleNamespace
CHUNK = 64
"""tokens, of the portable path"""


def _sums(s: Sizes, m: int) -> int:
    """FLOPs of the operation, for m features."""
    pairs = (min(CHUNK, s.length) + 1) * (m + s.head_dim) if s.causal else 0
    return s.length * (s.heads * (pairs + 2 * m * s.head_dim) + s.groups * 2 * m * s.head_dim)


def _projected(s: Sizes, rows: int) -> int:
    """FLOPs of queries and keys times a matrix [rows, D]."""
    return 2 * (s.heads + s.groups) * s.length * s.head_dim * rows


def _gates(s: Sizes) -> int:
    return 2 * s.groups * s.length * s.dim


def _cost(
    m: Callable[[int, Params], int],
    beside: Callable[[Sizes, Params], int],
    kept: Callable[[Sizes, Params, int], activations.Kept],
    more: int = 0,
) -> Cost:
    """m: features, from the head size; beside: FLOPs of making them; more: numbers of the state beside its sums."""
    return Cost(
        "a state",
        None,
        lambda n, p: 0,
        extra=lambda s, p: _sums(s, m(s.head_dim, p)) + beside(s, p),
        stored=lambda n, d, p: m(d, p) * (d + 1) + more,
        recurrent=lambda d, p: m(d, p) * (d + 1) + more,
        kept=lambda s, p: kept(s, p, m(s.head_dim, p)),
    )


LINEAR = Kind(
    "linear",
    "every earlier token, by a sum of keys' features (elu + 1) and values",
    "spanformer.attention.linear:LinearAttention.build",
    cost=_cost(lambda d, p: d, lambda s, p: 0, lambda s, p, m: activations.linear(s)),
    drawn="linear",
    timed="linear",
    tested=("linear",),
)
PERFORMER = Kind(
    "performer",
    "every earlier token, softmax attention estimated by `features` random features",
    "spanformer.attention.performer:Performer.build",
    params={"features": 256, "relu": False, "redraw": 0},
    zero=("redraw",),
    cost=_cost(
        lambda d, p: p.features,
        lambda s, p: _projected(s, p.features),
        lambda s, p, m: activations.performer(s, m, bool(p.relu)),
        more=1,
    ),
    drawn="performer(64)",
    timed="performer",
    tested=("performer(16)", "performer(16, relu=true)"),
)
RFA = Kind(
    "rfa",
    "every earlier token, a Gaussian kernel of unit vectors estimated by `frequencies` sines and cosines",
    "spanformer.attention.rfa:RFA.build",
    params={"frequencies": 64},
    cost=_cost(
        lambda d, p: 2 * p.frequencies,
        lambda s, p: _projected(s, p.frequencies),
        lambda s, p, m: activations.rfa(s, m),
    ),
    drawn="rfa(64)",
    timed="rfa",
    tested=("rfa(64)",),
)
GATED_RFA = Kind(
    "gated_rfa",
    "rfa with gates: each token fades all earlier ones",
    "spanformer.attention.rfa:GatedRFA.build",
    params={"frequencies": 64},
    cost=_cost(
        lambda d, p: 2 * p.frequencies,
        lambda s, p: _projected(s, p.frequencies) + _gates(s),
        lambda s, p, m: activations.gated_rfa(s, m),
    ),
    drawn="gated_rfa(64)",
    timed="gated_rfa",
    tested=("gated_rfa(64)",),
)
RETENTION = Kind(
    "retention",
    "every earlier token, fading by a fixed or learned factor per head",
    "spanformer.attention.retention:Retention.build",
    params={"learned": False},
    cost=_cost(lambda d, p: d, lambda s, p: 0, lambda s, p, m: activations.linear(s)),
    drawn="retention",
    timed="retention",
    tested=("retention", "retention(learned=true)"),
)
KINDS = (LINEAR, PERFORMER, RFA, GATED_RFA, RETENTION)
