"""Spec of learned positions."""

from spanformer.kinds.spec import PositionKind

KINDS = (
    PositionKind(
        "learned",
        "absolute: a learned vector for each position",
        "spanformer.position.absolute:Learned.build",
        cost="n·E additions, once, and a vector of E numbers for each place",
        needs_length=True,
        absolute=True,
        options=("length",),
    ),
    PositionKind(
        "learned_per_layer",
        "the same, before every layer",
        "spanformer.position.absolute:Learned.build",
        cost="n·E additions in every layer, and a vector of E numbers for each place and layer",
        per_layer=True,
        needs_length=True,
        absolute=True,
        options=("length",),
    ),
)
