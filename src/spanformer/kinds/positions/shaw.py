"""Spec of shaw positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "shaw",
    "a vector for each distance up to position.clip, for keys and for values",
    "spanformer.position.shaw:Shaw.build",
    cost="a product q·r[d] of 2·D operations a pair, half as much again as q·k and p·v"
    ", and p·b[d] as much for values; 2·D numbers for each distance up to the clip",
    per_layer=True,
    options=("clip",),
)
