"""Spec of alibi positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "alibi",
    "a fixed slope for each head, times the distance",
    "spanformer.position.alibi:Alibi.build",
    cost="one addition a pair",
)
