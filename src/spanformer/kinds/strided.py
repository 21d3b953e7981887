"""Specs of strided sparse attention: both factors in every head, or half of the heads each."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, every
from spanformer.kinds.spec import Kind

KINDS = (
    Kind(
        "strided",
        "the last `step` tokens, and every step-th before (Sparse Transformer)",
        "spanformer.attention.sparse:StridedSparse.build",
        params={"step": 64},
        cost=Cost(
            "step + n/step",
            lambda n, causal, p: pairs.strided(n, causal, p.step),
            every,
            kept=lambda s, p: activations.strided(s, p.step),
        ),
        drawn="strided(7)",
        timed="strided",
        tested=("strided(5)",),
    ),
    Kind(
        "strided_heads",
        "the last `step` tokens in half of the heads, every step-th in the others",
        "spanformer.attention.sparse:StridedSparse.build_by_head",
        params={"step": 64},
        cost=Cost(
            "(step + n/step) / 2",
            lambda n, causal, p: pairs.strided_heads(n, causal, p.step),
            lambda n, p: (min(n, p.step + 1) + n) / 2,
        ),
        drawn="2 strided_heads(7)",
        timed="strided_heads",
        tested=("strided_heads(5)",),
    ),
)
