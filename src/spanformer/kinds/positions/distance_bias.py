"""Spec of distance_bias positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "distance_bias",
    "a learned number for each head and distance",
    "spanformer.position.distance_bias:DistanceBias.build",
    cost="one addition a pair; a number for each head and distance",
)
