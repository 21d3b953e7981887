"""What a command is: the dataclass that holds its options, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HELP = frozenset({"-h", "--help"})
"""how a command, or all of it, is asked to explain itself"""


class Incomplete(Exception):
    """What was asked for is there, and something after it failed: a sentence, and exit code 1."""


@dataclass(frozen=True)
class Leaf:
    options: type
    """a dataclass; the text below each field is the option's help"""
    run: Callable
    """takes an instance of it"""
    parse: Callable[[str, list[str]], object] | None = None
    """(program, arguments) to such an instance, or a ValueError; None: every field is an option"""
