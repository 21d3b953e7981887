"""The tile sizes, warps and pipeline stages of each kernel, by head size and dtype. The compile gate reads the same
table, so what is checked is what runs."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


LARGEST_HEAD = 256
_TILES: dict[tuple[str, int], Tile] = {
    ("forward", 64): Tile(64, 64, 4, 3),
    ("forward", 128): Tile(128, 32, 8, 3),
    ("forward", 256): Tile(64, 32, 8, 2),
    ("backward_q", 64): Tile(64, 32, 4, 2),
    ("backward_q", 128): Tile(64, 32, 8, 2),
    ("backward_q", 256): Tile(32, 32, 8, 1),
    ("backward_kv", 64): Tile(32, 128, 8, 2),
    ("backward_kv", 128): Tile(32, 64, 8, 2),
    ("backward_kv", 256): Tile(32, 32, 8, 1),
}
"""(kernel, the larger block of head sizes) → the tile of 16-bit numbers"""
_MASKED: dict[tuple[str, int], Tile] = {
    ("forward", 64): Tile(32, 64, 4, 2),
    ("forward", 128): Tile(32, 32, 4, 2),
    ("backward_q", 64): Tile(32, 32, 4, 2),
    ("backward_q", 128): Tile(32, 32, 4, 2),
    ("backward_kv", 64): Tile(32, 32, 4, 2),
    ("backward_kv", 128): Tile(32, 16, 4, 2),
}
"""where every tile has a mask, which takes registers"""
_WIDE: dict[int, Tile] = {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)}
"""float32, all kernels"""
FEW = 16
"""the smallest tile of queries, for decoding"""
MERGED = 16
"""rows of a program of `merge`"""


def tile(step: str, head_size: int, bytes_each: int, queries: int, plain: bool = True) -> Tile:
    """step: a kernel's name; head_size: the larger one of keys and values, in a block of a power of two; plain: whether
    tiles can be full."""
    size = max(64, head_size)
    if step == "backward_bias":
        return Tile(16, 1, 4, 1)
    if step == "decode":
        return Tile(max(FEW, block(queries)), 64 if size <= 128 and bytes_each == 2 else 32, 4, 2)
    found = _TILES[step, size] if bytes_each == 2 else _WIDE[size]
    if bytes_each == 2 and not plain:
        found = _MASKED.get((step, size), found)
    if step == "forward" and queries <= FEW:
        return found._replace(queries=FEW)
    return found


def block(size: int) -> int:
    """The power of two that holds a head."""
    return max(16, power(size))


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
