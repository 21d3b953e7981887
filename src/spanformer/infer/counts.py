"""Limits on numbers of tokens, beams and guesses."""

from __future__ import annotations

LEAST = {"max_tokens": 1, "chunk": 1, "beams": 1, "lookup": 0}
MOST = {"beams": 1024, "lookup": 1024}
"""each beam is a row of the KV cache, and the KV cache has an extra slot for every guess"""


def check_counts(**counts: int) -> None:
    """Raise for numbers outside their limits, by name."""
    for name, value in counts.items():
        least, most = LEAST[name], MOST.get(name)
        if type(value) is not int or value < least or (most is not None and value > most):
            expected = f"{least} or more" if most is None else f"{least} … {most:,}"
            raise ValueError(f"{name} is {value}; expected {expected}")
