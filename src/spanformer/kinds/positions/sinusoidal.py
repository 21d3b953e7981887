"""Spec of sinusoidal positions."""

from spanformer.kinds.spec import PositionKind

KINDS = (
    PositionKind(
        "sinusoidal",
        "absolute: sines and cosines added to the tokens",
        "spanformer.position.absolute:Sinusoidal.build",
        cost="n·E additions, once",
        absolute=True,
        options=("base",),
    ),
    PositionKind(
        "sinusoidal_per_layer",
        "the same, before every layer, with the layer's number (Universal Transformer)",
        "spanformer.position.absolute:SinusoidalPerLayer.build",
        cost="n·E additions in every layer",
        per_layer=True,
        absolute=True,
        options=("base",),
    ),
)
