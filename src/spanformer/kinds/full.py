"""Spec of full attention."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost, up_to_max_span
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "full",
    "every token up to max_span",
    "spanformer.attention.full:build",
    params={"max_span": INHERIT},
    cost=Cost("max_span", lambda n, causal, p: pairs.window(n, causal, p.max_span), up_to_max_span),
    drawn="full",
    timed="full",
    tested=("full",),
    paper_compat=True,
)
