"""Spec of expiring spans."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "expire_span",
    "each token chooses how long it is remembered, by all heads",
    "spanformer.attention.expire_span:ExpireSpan.build",
    params={"max_span": INHERIT, "ramp": INHERIT},
    cost=Cost(
        "span + ramp",
        lambda n, causal, p: pairs.window(n, causal, p.span + int(p.ramp)),
        lambda n, p: p.max_span + int(p.ramp),
        assumed={"span": 256},
        noted=True,
        extra=lambda s, p: 2 * s.length * s.dim,
        kept=lambda s, p: activations.expiring(s),
    ),
    drawn="expire_span",
    timed="expire_span",
    tested=("expire_span",),
)
