"""Spec of rotary positions."""

from spanformer.kinds.spec import PositionKind

KIND = PositionKind(
    "rotary",
    "queries and keys rotated by their positions (RoPE)",
    "spanformer.position.rotary:Rotary.build",
    cost="n·D numbers a head rotated in queries and in keys, 6 operations each",
    options=("base", "length", "scaling", "factor"),
)
