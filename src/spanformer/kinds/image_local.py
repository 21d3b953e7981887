"""Specs of local attention over images, in one and two dimensions."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import Kind

KINDS = (
    Kind(
        "image_1d",
        "the token's block, and `memory` tokens before it",
        "spanformer.attention.image_local:ImageLocal1D.build",
        params={"block": 64, "memory": 64},
        cost=Cost(
            "block/2 + memory",
            lambda n, causal, p: pairs.image_1d(n, causal, p.block, p.memory),
            lambda n, p: p.block + p.memory,
        ),
        zero=("memory",),
        drawn="image_1d(8, 8)",
        timed="image_1d(256, 256)",
        tested=("image_1d(8, 4)",),
    ),
    Kind(
        "image_2d",
        "the token's block of `high` × `wide` pixels, the lines `above` and the columns `beside` it",
        "spanformer.attention.image_local:ImageLocal2D.build",
        params={"width": 32, "high": 8, "wide": 8, "above": 8, "beside": 8},
        cost=Cost(
            "high·wide/2 + above·(wide + 2beside) + high·beside",
            lambda n, causal, p: pairs.image_2d(n, causal, p.width, p.high, p.wide, p.above, p.beside),
            lambda n, p: (-(-p.above // p.high) * (p.width // p.wide) + -(-p.beside // p.wide) + 1) * p.high * p.wide,
        ),
        zero=("above", "beside"),
        drawn="image_2d(12, 2, 4, 2, 2)",
        timed="image_2d(64)",
        tested=("image_2d(6, 2, 3, 1, 2)",),
    ),
)
