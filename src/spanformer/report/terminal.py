"""Matrices on a terminal: patterns as half-blocks, two rows a line, and weights as shades with a label a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

SHADES = " ·░▒▓█"
HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def half_blocks(seen: np.ndarray) -> str:
    """seen [rows, columns] bool: one character for two rows, so that the picture is about as high as wide."""
    rows = seen if len(seen) % 2 == 0 else np.vstack([seen, np.zeros_like(seen[:1])])
    lines = ("".join(HALVES[bool(a), bool(b)] for a, b in zip(*pair, strict=True)) for pair in _pairs(rows))
    return "\n".join(lines)


def beside(pictures: Mapping[str, str], width: int = 80) -> str:
    """Pictures of the same size with their titles above, as many in a line as have room."""
    blocks = [[title, *text.split("\n")] for title, text in pictures.items()]
    wide = max(len(line) for block in blocks for line in block) + 3
    fit, lines = max(1, (width + 3) // wide), []
    for at in range(0, len(blocks), fit):
        some = blocks[at : at + fit]
        lines += ["".join(line.ljust(wide) for line in row).rstrip() for row in zip(*some, strict=True)] + [""]
    return "\n".join(lines)


def shades(weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], width: int = 80) -> str:
    """weights [Tq, Tk] in 0 … 1: a line a query, its token before it, and two characters a key where they have room.

    Shades follow the square root of weights, so that small ones are visible. Keys that do
    not fit are merged, with the largest of their weights.
    """
    named = [query[:8] for query in queries]
    margin = max(map(len, named)) + 2
    room = max(8, width - margin - 1)
    together = -(-len(keys) // room)
    columns = _largest(weights, together)
    wide = 2 if 2 * columns.shape[1] <= room else 1
    heads = "".join(key[:1].ljust(wide) for key in keys[::together])
    lines = [" " * margin + heads.rstrip()]
    for query, row in zip(named, columns, strict=True):
        cells = "".join(SHADES[_shade(float(a))] * wide for a in row)
        lines.append(f"{query:>{margin - 2}}  {cells.rstrip()}")
    return "\n".join(lines)


def _shade(weight: float) -> int:
    """Blank for nothing at all, and the darkest for all of it."""
    return 0 if weight <= 0 else 1 + min(len(SHADES) - 2, int(np.sqrt(weight) * (len(SHADES) - 1)))


def _largest(weights: np.ndarray, together: int) -> np.ndarray:
    starts = np.arange(0, weights.shape[1], together)
    return np.maximum.reduceat(weights, starts, axis=1)


def _pairs(rows: np.ndarray):
    return zip(rows[::2], rows[1::2], strict=True)
