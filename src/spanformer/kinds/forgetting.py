"""Spec of the Forgetting Transformer."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, gates, up_to_max_span
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "forgetting",
    "every token up to max_span, fading by the gates between; needs no positions",
    "spanformer.attention.forgetting:Forgetting.build",
    params={"max_span": INHERIT},
    cost=Cost(
        "max_span",
        lambda n, causal, p: pairs.window(n, causal, p.max_span),
        up_to_max_span,
        noted=True,
        extra=gates,
        kept=lambda s, p: activations.forgetting(s),
    ),
    drawn="forgetting",
    timed="forgetting",
    tested=("forgetting",),
)
