"""What each mechanism sees, written from its definition: of one pair at a time, in both directions."""

from __future__ import annotations

from types import SimpleNamespace

from spanformer.kinds import KINDS

FAR = 1 << 30


def same(i, j, size):
    return i // size == j // size


def far(d, w, s):
    return d % s == 0 and d // s < w


def pixel(t, x, h, w):
    """Line and column of a token's block, and of its own."""
    block, place = divmod(t, h * w)
    top, left = block // (x // w) * h, block % (x // w) * w
    return top, left, top + place // w, left + place % w


def beside_pixel(i, j, x, h, w, above, beside):
    top, left, _, _ = pixel(i, x, h, w)
    _, _, line, column = pixel(j, x, h, w)
    return top - above <= line < top + h and left - beside <= column < left + w + beside


# (n, i, j, *numbers) → whether query i sees key j, both directions; causality is added by `count`
DEFINITIONS = {
    "full": lambda n, i, j: True,
    "forgetting": lambda n, i, j: True,
    "additive": lambda n, i, j: True,
    "chunked": lambda n, i, j, c, k: True,
    "window": lambda n, i, j, w: abs(i - j) < w,
    "adaptive_span": lambda n, i, j, z, r: (r + z - abs(i - j)) / r > 0,
    "dynamic_span": lambda n, i, j, z, r, most: (r + z - abs(i - j)) / r > 0,
    "expire_span": lambda n, i, j, e, r, most: (r + e - abs(i - j)) / r > 0,
    "dilated": lambda n, i, j, w, s: far(abs(i - j), w, s),
    "strided": lambda n, i, j, size: abs(i - j) < size or (i - j) % size == 0,
    "fixed": lambda n, i, j, size, c: same(i, j, size) or j % size >= size - c,
    "image_1d": lambda n, i, j, size, m: -m <= j - i // size * size < size + m,
    "image_2d": lambda n, i, j, x, h, w, above, beside: beside_pixel(i, j, x, h, w, above, beside),
    "longformer": lambda n, i, j, w, g, s: far(abs(i - j), w // 2 + 1, s) or i < g or j < g,
    "sink_window": lambda n, i, j, w, s: abs(i - j) < w or j < s,
    "sink_span": lambda n, i, j, s, z, r: (r + z - abs(i - j)) / r > 0 or j < s,
    "dot": lambda n, i, j: True,
    "general": lambda n, i, j: True,
    "bilinear": lambda n, i, j: True,
    "blockwise": lambda n, i, j, k, size, s: j // size == i // size // k * k + (i // size % k - s) % k,
}
HALVES = {
    "strided_heads": (lambda n, i, j, size: abs(i - j) <= size, lambda n, i, j, size: (i - j) % size == 0),
    "fixed_heads": (lambda n, i, j, size, c: same(i, j, size), lambda n, i, j, size, c: j % size >= size - c),
}
"""what the first half of the heads sees, and what the other"""
CAUSAL = {"longformer": lambda n, i, j, w, g, s: far(i - j, w, s) or i < g or j < g}
"""where what is seen of the past is not what is left of both directions"""
NUMBERS = {
    "window": [(0,), (1,), (5,), (50,)],
    "adaptive_span": [(0, 1), (3, 4), (30, 32)],
    "dynamic_span": [(0, 1, 9), (3, 4, 9)],
    "expire_span": [(0, 2, 60), (3, 4, 60), (50, 3, 60)],
    "dilated": [(1, 3), (3, 1), (4, 3), (50, 2), (5, 20)],
    "strided": [(1,), (2,), (5,), (50,)],
    "fixed": [(4, 1), (5, 0), (5, 5), (3, 7), (64, 8)],
    "image_1d": [(1, 0), (4, 3), (5, 9), (64, 2)],
    "image_2d": [(4, 2, 2, 1, 1), (6, 3, 2, 4, 3), (6, 1, 3, 0, 2), (8, 2, 8, 3, 0), (4, 2, 1, 9, 9)],
    "longformer": [(1, 0, 1), (3, 2, 1), (4, 9, 2), (2, 50, 3), (50, 3, 1), (6, 5, 4)],
    "sink_window": [(1, 0), (3, 2), (4, 9), (2, 50), (50, 3)],
    "sink_span": [(2, 3, 4), (0, 1, 2)],
    "blockwise": [(1, 50, 0), (2, 4, 1), (3, 3, 1), (4, 5, 0), (4, 2, 2), (5, 1, 7)],
    "chunked": [(4, 8)],
}
NAMES = {
    "adaptive_span": ("span", "ramp"), "dynamic_span": ("span", "ramp", "max_span"),
    "expire_span": ("span", "ramp", "max_span"), "sink_span": ("sink_tokens", "span", "ramp"),
    "chunked": ("queries", "keys"),
}  # fmt: skip
"""of the numbers, where they are not the kind's parameters in their order"""


def params(name, numbers):
    """The parameters that a kind's cost takes, from the numbers above."""
    kind = KINDS[name]
    names = NAMES.get(name) or [*kind.params, *kind.cost.assumed]
    return SimpleNamespace(**({"max_span": FAR} | dict(zip(names, numbers, strict=False))))


def sees(name, causal):
    """The definition, causality included."""
    defined = CAUSAL.get(name, DEFINITIONS[name]) if causal else DEFINITIONS[name]
    return lambda n, i, j, *numbers: (j <= i or not causal) and bool(defined(n, i, j, *numbers))
