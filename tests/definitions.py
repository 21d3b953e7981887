"""What each mechanism sees, written from its definition: of one pair at a time, in both directions."""

from __future__ import annotations


def same(i, j, size):
    return i // size == j // size


def far(d, w, s):
    return d % s == 0 and d // s < w


# (n, i, j, *numbers) → whether query i sees key j, both directions; causality is added by `count`
DEFINITIONS = {
    "full": lambda n, i, j: True,
    "forgetting": lambda n, i, j: True,
    "additive": lambda n, i, j: True,
    "chunked": lambda n, i, j, c: True,
    "window": lambda n, i, j, w: abs(i - j) < w,
    "adaptive_span": lambda n, i, j, z, r: (r + z - abs(i - j)) / r > 0,
    "dynamic_span": lambda n, i, j, z, r, most: (r + z - abs(i - j)) / r > 0,
    "expire_span": lambda n, i, j, e, r: (r + e - abs(i - j)) / r > 0,
    "sinks": lambda n, i, j, w, s: abs(i - j) < w or j < s,
    "dilated": lambda n, i, j, w, s: far(abs(i - j), w, s),
    "strided": lambda n, i, j, size: abs(i - j) < size or (i - j) % size == 0,
    "fixed": lambda n, i, j, size, c: same(i, j, size) or j % size >= size - c,
    "image_1d": lambda n, i, j, size, m: same(i, j, size) or 0 < i // size * size - j <= m,
    "longformer": lambda n, i, j, w, g: abs(i - j) < w or i < g or j < g,
    "blockwise": lambda n, i, j, k, s: j // -(-n // k) == (i // -(-n // k) - s) % -(-n // -(-n // k)),
}
NUMBERS = {
    "window": [(0,), (1,), (5,), (50,)],
    "adaptive_span": [(0, 1), (3, 4), (30, 32)],
    "dynamic_span": [(0, 1, 9), (3, 4, 9)],
    "expire_span": [(0, 2), (3, 4), (50, 3)],
    "sinks": [(1, 0), (3, 2), (4, 9), (2, 50), (50, 3)],
    "dilated": [(1, 3), (3, 1), (4, 3), (50, 2), (5, 20)],
    "strided": [(1,), (2,), (5,), (50,)],
    "fixed": [(4, 1), (5, 0), (5, 5), (3, 7), (64, 8)],
    "image_1d": [(1, 0), (4, 3), (5, 9), (64, 2)],
    "longformer": [(1, 0), (3, 2), (4, 9), (2, 50), (50, 3)],
    "blockwise": [(1, 0), (2, 1), (3, 1), (4, 0), (4, 2), (5, 7)],
    "chunked": [(4,)],
}
