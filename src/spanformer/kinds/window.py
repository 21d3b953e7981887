"""Spec of fixed windows."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "window",
    "the last `window` tokens",
    "spanformer.attention.window:Window.build",
    params={"window": INHERIT},
    cost=Cost("window", lambda n, causal, p: pairs.window(n, causal, p.window), lambda n, p: p.window),
    drawn="window(8)",
    timed="window(256)",
    tested=("window(9)",),
    paper_compat=True,
)
