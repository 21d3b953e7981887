"""How much may be asked of a search, a look-up and a prompt."""

from __future__ import annotations

LEAST = {"max_tokens": 1, "chunk": 1, "beams": 1, "lookup": 0}
MOST = {"beams": 1024, "lookup": 1024}
"""each beam is a row of the cache, and a cache has room for every guess beside what it keeps"""


def check_counts(**counts: int) -> None:
    """Refuse numbers of tokens, beams or guesses that cannot be, by their names."""
    for name, value in counts.items():
        least, most = LEAST[name], MOST.get(name)
        if type(value) is not int or value < least or (most is not None and value > most):
            expected = f"{least} or more" if most is None else f"{least} … {most:,}"
            raise ValueError(f"{name} is {value}; expected {expected}")
