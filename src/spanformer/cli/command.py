"""A command: the dataclass of its options, and the function that runs with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HELP = frozenset({"-h", "--help"})
"""arguments that print the help of a command, or of the whole program"""


class Incomplete(Exception):
    """The main result is complete, but a later step failed: the program prints this message and exits with code 1."""


@dataclass(frozen=True)
class Command:
    options: type
    """a dataclass; the text below each field is the option's help"""
    run: Callable
    """takes an instance of `options`"""
    parse: Callable[[str, list[str]], object] | None = None
    """returns that instance from (program, arguments), or raises ValueError; None: every field is an option"""
