"""Spec of adaptive spans."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "adaptive_span",
    "each head learns how far it looks",
    "spanformer.attention.adaptive_span:AdaptiveSpan.build",
    params={"max_span": INHERIT, "ramp": INHERIT},
    cost=Cost(
        "span + ramp",
        lambda n, causal, p: pairs.window(n, causal, p.span + int(p.ramp)),
        lambda n, p: p.span + int(p.ramp),
        assumed={"span": 256},
    ),
    drawn="3 adaptive_span",
    timed="adaptive_span",
    tested=("adaptive_span",),
    paper_compat=True,
)
