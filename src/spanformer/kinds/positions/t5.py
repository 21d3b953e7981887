"""Spec of t5 positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "t5",
    "a learned number for each head and bucket of distances",
    "spanformer.position.t5:T5.build",
    cost="one addition a pair; 32 numbers a head",
)
