"""Patterns: which pairs of positions are visible, as plain data that composes like sets.

Window(256) | Global([0]) | Random(3, seed=1)        Strided(64) & Window(1024)        parse("Fixed(128, 8)")
"""

from __future__ import annotations

from spanformer.attention.pattern.base import Both, Either, Pattern
from spanformer.attention.pattern.distance import Dilated, Every, Full, Strided, Window
from spanformer.attention.pattern.draws import Blockwise, Random
from spanformer.attention.pattern.place import Block, Fixed, Global, Grid, Summary
from spanformer.attention.pattern.rule import make_rule
from spanformer.attention.pattern.text import read

PATTERNS = {
    kind.__name__: kind
    for kind in (Full, Window, Dilated, Every, Strided, Block, Summary, Fixed, Global, Random, Blockwise, Grid)
}
"""patterns by their names in expressions"""


def parse(text: str) -> Pattern:
    """A pattern from an expression such as "Window(256) | Global([0]) | Random(3, seed=1)"."""
    return read(text, PATTERNS)


__all__ = [*PATTERNS, "PATTERNS", "Both", "Either", "Pattern", "make_rule", "parse"]  # pyright: ignore
