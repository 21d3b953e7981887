"""Specs of fixed sparse attention: both factors in every head, or half of the heads each."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost, every
from spanformer.kinds.spec import Kind

KINDS = (
    Kind(
        "fixed",
        "the token's block of `size`, and the `last` tokens of every block (Sparse Transformer)",
        "spanformer.attention.sparse:FixedSparse.build",
        params={"size": 64, "last": 4},
        cost=Cost("size/2 + last·n/2size", lambda n, causal, p: pairs.fixed(n, causal, p.size, p.last), every),
        zero=("last",),
        drawn="fixed(8, 2)",
        timed="fixed(64, 8)",
        tested=("fixed(6, 2)",),
    ),
    Kind(
        "fixed_heads",
        "the token's block of `size` in half of the heads, the `last` tokens of every block in the others",
        "spanformer.attention.sparse:FixedSparse.build_by_head",
        params={"size": 64, "last": 4},
        cost=Cost(
            "(size/2 + last·n/2size) / 2",
            lambda n, causal, p: pairs.fixed_heads(n, causal, p.size, p.last),
            lambda n, p: (min(n, p.size) + n) / 2,
        ),
        zero=("last",),
        drawn="2 fixed_heads(8, 2)",
        timed="fixed_heads(64, 8)",
        tested=("fixed_heads(6, 2)",),
    ),
)
