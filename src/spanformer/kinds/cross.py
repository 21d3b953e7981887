"""Spec of attention to another text. It is the second attention in the layers of an encoder–decoder and no
kind of self-attention, so it is not registered."""

from spanformer.cost import activations
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import Kind

CROSS = Kind(
    "cross",
    "all tokens of another text, `source` of them",
    "spanformer.attention.cross:Cross.build",
    params={"source": 512},
    cost=Cost(
        "source",
        lambda n, causal, p: n * p.source,
        lambda n, p: p.source,
        source=True,
        kept=lambda s, p: activations.cross(s, p.source),
        alone=lambda p: True,
    ),
    drawn="cross",
    timed="cross",
)
