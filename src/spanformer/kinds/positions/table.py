"""Spec of table positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "table",
    "a vector for each distance, for all layers (the adaptive-span paper's)",
    "spanformer.position.table:Table.build",
    cost="a product q·r[d] of 2·D operations a pair, half as much again as q·k and p·v; D numbers for each distance",
)
