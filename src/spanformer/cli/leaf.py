"""What a command is: the dataclass that holds its options, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Leaf:
    options: type
    """a dataclass; the text below each field is the option's help"""
    run: Callable
    """takes an instance of it"""
