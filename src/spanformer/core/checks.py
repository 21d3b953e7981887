"""Checks of values that come from files."""

from __future__ import annotations

import math


def whole_number(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """The value, if it is an int in least … most. A bool is refused."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; expected a whole number {limits}")
    return value


def finite_number(name: str, value: object) -> float:
    """The value as a float, if it is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):  # pyright: ignore[reportArgumentType]
        raise ValueError(f"{name} is {value!r}; expected a finite number")
    return float(value)  # pyright: ignore[reportArgumentType]
