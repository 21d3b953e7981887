"""Spec of dynamic spans."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, gates
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "dynamic_span",
    "each token and head chooses how far it looks",
    "spanformer.attention.dynamic_span:DynamicSpan.build",
    params={"max_span": INHERIT, "ramp": INHERIT},
    cost=Cost(
        "span + ramp",
        lambda n, causal, p: pairs.window(n, causal, p.span + int(p.ramp)),
        lambda n, p: p.max_span + int(p.ramp),
        assumed={"span": 256},
        extra=gates,
        kept=lambda s, p: activations.spans(s),
    ),
    drawn="2 dynamic_span",
    timed="dynamic_span",
    tested=("dynamic_span",),
)
