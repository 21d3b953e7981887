"""Spec of BigBird."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost, every
from spanformer.kinds.spec import Kind

KIND = Kind(
    "big_bird",
    "blocks: `window` around the token's own, the first `tokens`, and `random` random ones",
    "spanformer.attention.big_bird:BigBird.build",
    params={"block": 16, "window": 3, "tokens": 1, "random": 2},
    cost=Cost(
        "(window + tokens + random)·block",
        lambda n, causal, p: pairs.big_bird(n, causal, p.block, p.window, p.tokens, p.random),
        every,
    ),
    zero=("tokens", "random"),
    drawn="2 big_bird(4)",
    timed="big_bird(64, 3, 2, 3)",
    tested=("big_bird(4, 3, 1, 1)",),
)
