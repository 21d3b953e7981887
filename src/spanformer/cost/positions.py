"""What position encodings add to attention, for n tokens, P pairs that a head sees, head size D and width E."""

from __future__ import annotations

_TURNED = "n·D numbers a head turned in queries and in keys, 6 operations each"
_ADDED = "one addition a pair"
_VECTOR = "a product q·r[d] of 2·D operations a pair, half as much again as q·k and p·v"

POSITION_COSTS: dict[str, str] = {
    "none": "nothing",
    "sinusoidal": "n·E additions, once",
    "sinusoidal_per_layer": "n·E additions in every layer",
    "learned": "n·E additions, once, and a vector of E numbers for each place",
    "learned_per_layer": "n·E additions in every layer, and a vector of E numbers for each place and layer",
    "rotary": _TURNED,
    "alibi": _ADDED,
    "t5": f"{_ADDED}; 32 numbers a head",
    "distance_bias": f"{_ADDED}; a number for each head and distance",
    "table": f"{_VECTOR}; D numbers for each distance",
    "shaw": f"{_VECTOR}, and p·b[d] as much for values; 2·D numbers for each distance up to the clip",
    "transformer_xl": f"{_VECTOR}, an addition a pair, and 2·E² operations for each distance's vectors",
    "da_transformer": "one multiplication and a ReLU a pair; two numbers a head",
}
"""by name of POSITIONS"""
