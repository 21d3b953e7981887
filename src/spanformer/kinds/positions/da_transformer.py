"""Spec of da_transformer positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "da_transformer",
    "scores multiplied by a learned function of the distance",
    "spanformer.position.da_transformer:DATransformer.build",
    cost="one multiplication and a ReLU a pair; two numbers a head",
    per_layer=True,
)
