"""Spec of transformer_xl positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "transformer_xl",
    "a vector for each distance, projected from sines",
    "spanformer.position.transformer_xl:TransformerXL.build",
    cost="a product q·r[d] of 2·D operations a pair, half as much again as q·k and p·v"
    ", an addition a pair, and 2·E² operations for each distance's vectors",
    per_layer=True,
)
