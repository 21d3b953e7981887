"""Spec of none positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "none",
    "no position encoding",
    "spanformer.position.base:build",
    cost="nothing",
    absolute=True,
)
