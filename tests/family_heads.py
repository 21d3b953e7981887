"""What the heads of every kind see, written from their equations: all pairs, in both directions. A layer that does not
look ahead leaves those out itself.

Shapes: B batch, H heads, T tokens. x [B, T, dim] is what a layer's queries and keys are made of, m its mechanism.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SPAN, RAMP, WINDOW = 23, 5.0, 9


def distances(x: Tensor) -> Tensor:
    """i − j, [T, T]"""
    at = torch.arange(x.shape[1])
    return at[:, None] - at[None, :]


# ---- log of what multiplies each weight, [B or 1, H or 1, T, T]; −inf where nothing is seen


def seen(x: Tensor, visible) -> Tensor:
    """From a definition of pairs (i, j)."""
    every = range(x.shape[1])
    rows = [[0.0 if visible(i, j) else -math.inf for j in every] for i in every]
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def ramped(x: Tensor, z: Tensor) -> Tensor:
    return ((RAMP + z - distances(x).abs()) / RAMP).clamp(0, 1).log()


def by_head(x: Tensor, visible) -> Tensor:
    return torch.cat([seen(x, lambda i, j, h=h: visible(h, i, j)) for h in range(4)], 1)


def full(x: Tensor) -> Tensor:
    return seen(x, lambda i, j: abs(i - j) < SPAN)


def half_window(m, w: int) -> int:
    """How many tokens away Longformer's window ends: w before a token, or w/2 on each side."""
    return w - 1 if m.causal else w // 2


def around_in_image(i: int, j: int) -> bool:
    """Width 6, tokens in the order of blocks of 2 × 3; a block sees itself, 1 line above and 2 columns beside."""

    def pixel(t: int) -> tuple[int, int]:
        number, within = divmod(t, 6)
        return number // 2 * 2 + within // 3, number % 2 * 3 + within % 3

    (line, column), (top, left) = pixel(j), pixel(i // 6 * 6)
    return top - 1 <= line < top + 2 and left - 2 <= column < left + 3 + 2


def big_bird(x: Tensor, random: list[list[list[bool]]]) -> Tensor:
    near = lambda i, j: abs(i // 4 - j // 4) <= 1 or min(i, j) < 4  # noqa: E731
    return by_head(x, lambda h, i, j: abs(i - j) < SPAN and (near(i, j) or random[h][i][j]))


def drawn(m, x: Tensor, head: int) -> list[list[bool]]:
    """The random part, whatever was drawn; that the draws are right is tested beside them."""
    at, random = torch.arange(x.shape[1]), m.patterns[head].parts[-1]
    return random.visible(at[:, None], at[None], causal=m.causal, length=len(at)).tolist()


def kept_and(x: Tensor, inner: Tensor, kept: int) -> Tensor:
    return torch.maximum(inner, seen(x, lambda i, j: j < kept))


def spans(m, x: Tensor) -> Tensor:
    return ramped(x, (m.ratio * m.max_span)[None, :, None, None])


def dynamic(m, x: Tensor) -> Tensor:
    return ramped(x, (m.max_span * (x @ m.weight.T + m.bias).sigmoid()).transpose(1, 2)[..., None])


def expiring(m, x: Tensor) -> Tensor:
    return ramped(x, (m.max_span * (x @ m.weight[0] + m.bias).sigmoid())[:, None, None, :])


def forgetting(m, x: Tensor) -> Tensor:
    gates = F.logsigmoid(x @ m.weight.T + m.bias).transpose(1, 2)  # [B, H, T]
    every = range(x.shape[1])
    between = torch.stack([
        torch.stack([gates[..., j + 1 : i + 1].sum(-1) if j <= i else gates[..., 0] for j in every], -1) for i in every
    ], -2)  # fmt: skip
    return between + full(x)


MECHANISMS = {
    "adaptive_span": spans,
    "dynamic_span": dynamic,
    "window:9": lambda m, x: seen(x, lambda i, j: abs(i - j) < 9),
    "full": lambda m, x: full(x),
    "longformer:8": lambda m, x: seen(x, lambda i, j: abs(i - j) <= half_window(m, 8)),
    "longformer:6:2": lambda m, x: seen(x, lambda i, j: abs(i - j) <= (SPAN - 1 if j < 2 else half_window(m, 6))),
    "expire_span": expiring,
    "forgetting": forgetting,
    "sink_window:6": lambda m, x: seen(x, lambda i, j: abs(i - j) < 6),
    "sink_window:6:2": lambda m, x: kept_and(x, seen(x, lambda i, j: abs(i - j) < 6), 2),
    "sink_span:2": lambda m, x: kept_and(x, spans(m.inner, x), 2),
    "dot": lambda m, x: full(x),
    "general": lambda m, x: full(x),
    "bilinear": lambda m, x: full(x),
    "additive": lambda m, x: full(x),
    "chunked": lambda m, x: full(x),
    "dilated:4:3": lambda m, x: seen(x, lambda i, j: (i - j) % 3 == 0 and abs(i - j) // 3 < 4),
    "strided:5": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and (abs(i - j) <= 5 or (i - j) % 5 == 0)),
    "strided_heads:5": lambda m, x: by_head(
        x, lambda h, i, j: abs(i - j) < SPAN and (abs(i - j) <= 5 if h < 2 else (i - j) % 5 == 0)
    ),
    "fixed:6:2": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and (i // 6 == j // 6 or j % 6 >= 4)),
    "fixed_heads:6:2": lambda m, x: by_head(
        x, lambda h, i, j: abs(i - j) < SPAN and (i // 6 == j // 6 if h < 2 else j % 6 >= 4)
    ),
    "image_1d:8:4": lambda m, x: seen(x, lambda i, j: -4 <= j - i // 8 * 8 < 8 + 4),
    "image_2d:6:2:3:1:2": lambda m, x: seen(x, around_in_image),
    "blockwise:3:4": lambda m, x: by_head(
        x, lambda h, i, j: i // 12 == j // 12 and j // 4 % 3 == (i // 4 % 3 - (0, 0, 1, 2)[h]) % 3
    ),
    "big_bird:4:3:1:1": lambda m, x: big_bird(x, [drawn(m, x, h) for h in range(4)]),
    "Window(4) | Global([0, 9])": lambda m, x: seen(
        x, lambda i, j: abs(i - j) < SPAN and (abs(i - j) < 4 or i in (0, 9) or j in (0, 9))
    ),
    "2 window:9 + 2 adaptive_span": lambda m, x: torch.cat(
        [seen(x, lambda i, j: abs(i - j) < 9).expand(1, 2, -1, -1), spans(m.parts[1], x)], 1
    ),
}
FACTORS = {
    "Window(6)": lambda m, x: seen(x, lambda i, j: abs(i - j) <= 5),
    "Every(5)": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and (i - j) % 5 == 0),
    "Block(6)": lambda m, x: seen(x, lambda i, j: i // 6 == j // 6),
    "Summary(6, 2)": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and j % 6 >= 4),
}
"""of strided and of fixed attention, a layer each"""
TWO_STREAMS = ("etc:5:6:3", "etc_apart:5:6:3:1")
"""kinds with tokens beside those of the text, see `family.two_streams`"""
