"""What the heads of every kind see, written from their equations: all pairs, in both directions. A layer that does not
look ahead leaves those out itself. A new kind gets a line in `ORACLES`; the product test fails without one.

Shapes: B batch, H heads, T tokens. x [B, T, dim] is what a layer's queries and keys are made of, m its mechanism, p its
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.kinds import HeadSpec, Section
from spanformer.kinds.notation import PATTERN, parse_layer

HEADS, SPAN, RAMP, WINDOW = 4, 23, 5.0, 9
SECTION = Section(max_span=SPAN, ramp=RAMP, window=WINDOW)
Oracle = Callable[..., Tensor]


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
    return torch.cat([seen(x, lambda i, j, h=h: visible(h, i, j)) for h in range(HEADS)], 1)


def full(x: Tensor) -> Tensor:
    return seen(x, lambda i, j: abs(i - j) < SPAN)


def around_in_image(i: int, j: int, p: SimpleNamespace) -> bool:
    """Tokens in the order of blocks of high × wide; a block sees itself, some lines above and columns beside."""

    def pixel(t: int) -> tuple[int, int]:
        (number, within), across = divmod(t, p.high * p.wide), p.width // p.wide
        return number // across * p.high + within // p.wide, number % across * p.wide + within % p.wide

    (line, column), (top, left) = pixel(j), pixel(i // (p.high * p.wide) * p.high * p.wide)
    return top - p.above <= line < top + p.high and left - p.beside <= column < left + p.wide + p.beside


def big_bird(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    def near(i: int, j: int) -> bool:
        return abs(i // p.block - j // p.block) <= p.window // 2 or min(i, j) < p.tokens * p.block

    random = [drawn(m, x, h) for h in range(HEADS)]
    return by_head(x, lambda h, i, j: abs(i - j) < SPAN and (near(i, j) or random[h][i][j]))


def longformer(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    """A window of w tokens before a token, or w/2 on each side; global tokens are seen by all."""
    near = p.window - 1 if m.causal else p.window // 2
    return seen(x, lambda i, j: abs(i - j) <= (SPAN - 1 if j < p.globals else near))


def blockwise(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    """Blocks of blocks; the shifts of four heads over three blocks are 0, 0, 1, 2."""
    assert p.blocks == 3
    round_ = p.blocks * p.size
    return by_head(
        x, lambda h, i, j: i // round_ == j // round_ and j // p.size % 3 == (i // p.size % 3 - (0, 0, 1, 2)[h]) % 3
    )


def drawn(m, x: Tensor, head: int) -> list[list[bool]]:
    """The random part, whatever was drawn; that the draws are right is tested beside them."""
    at, random = torch.arange(x.shape[1]), m.patterns[head].parts[-1]
    return random.visible(at[:, None], at[None], causal=m.causal, length=len(at)).tolist()


def kept_and(x: Tensor, inner: Tensor, sink_tokens: int) -> Tensor:
    return torch.maximum(inner, seen(x, lambda i, j: j < sink_tokens))


def spans(m, x: Tensor, p=None) -> Tensor:
    return ramped(x, (m.ratio * m.max_span)[None, :, None, None])


def dynamic(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    return ramped(x, (m.max_span * (x @ m.weight.T + m.bias).sigmoid()).transpose(1, 2)[..., None])


def expiring(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    return ramped(x, (m.max_span * (x @ m.weight[0] + m.bias).sigmoid())[:, None, None, :])


def forgetting(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    gates = F.logsigmoid(x @ m.weight.T + m.bias).transpose(1, 2)  # [B, H, T]
    every = range(x.shape[1])
    between = torch.stack([
        torch.stack([gates[..., j + 1 : i + 1].sum(-1) if j <= i else gates[..., 0] for j in every], -1) for i in every
    ], -2)  # fmt: skip
    return between + full(x)


def eight_bits(x: Tensor) -> Tensor:
    """Whole multiples of 1/128 of the power of 2 above the largest number of a vector."""
    unit = 2.0 ** (x.abs().amax(-1, keepdim=True).log2().floor() + 1 - 7)
    return (x / unit).round() * unit


def indexed(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    """The rank of each key among those that its query may see, by the index; of equal ones the later key is first."""
    j, e, d, index = m.index_heads, m.index_dim, distances(x), m.index.detach()
    a, c, w = (x.detach() @ part.T for part in index.split([j * e, e, j]))
    products = torch.einsum("bine,bje->bnij", eight_bits(a.view(*a.shape[:2], j, e)), eight_bits(c)).relu()
    score = (torch.einsum("bin,bnij->bij", w, products) / math.sqrt(j * e)).float()
    visible = (d.abs() < m.max_span) & ((d >= 0) | (not m.causal))
    score = torch.where(visible, score, -math.inf)
    at = torch.arange(x.shape[1])
    ahead = (score[..., None, :] > score[..., None]) | ((score[..., None, :] == score[..., None]) & (at > at[:, None]))
    rank = (ahead & visible[:, None]).sum(-1)[:, None]  # [B, 1, T, T]
    weight = (rank < m.keys).double()
    if m.span is not None:
        weight = ((m.span.ramp + m.span.ratio * m.span.max_span - rank) / m.span.ramp).clamp(0, 1)
    return torch.where(visible, weight, 0).log()


ORACLES: dict[str, Oracle] = {
    "adaptive_span": spans,
    "dynamic_span": dynamic,
    "window": lambda m, x, p: seen(x, lambda i, j: abs(i - j) < p.window),
    "full": lambda m, x, p: full(x),
    "longformer": longformer,
    "expire_span": expiring,
    "forgetting": forgetting,
    "sink_window": lambda m, x, p: kept_and(x, seen(x, lambda i, j: abs(i - j) < p.window), p.sink_tokens),
    "sink_span": lambda m, x, p: kept_and(x, spans(m.inner, x), p.sink_tokens),
    "dot": lambda m, x, p: full(x),
    "general": lambda m, x, p: full(x),
    "bilinear": lambda m, x, p: full(x),
    "additive": lambda m, x, p: full(x),
    "chunked": lambda m, x, p: full(x),
    "hard": lambda m, x, p: full(x),
    "hard_sampled": lambda m, x, p: full(x),
    "indexed": indexed,
    "dilated": lambda m, x, p: seen(x, lambda i, j: (i - j) % p.step == 0 and abs(i - j) // p.step < p.window),
    "strided": lambda m, x, p: seen(
        x, lambda i, j: abs(i - j) < SPAN and (abs(i - j) <= p.step or (i - j) % p.step == 0)
    ),
    "strided_heads": lambda m, x, p: by_head(
        x, lambda h, i, j: abs(i - j) < SPAN and (abs(i - j) <= p.step if h < HEADS // 2 else (i - j) % p.step == 0)
    ),
    "fixed": lambda m, x, p: seen(
        x, lambda i, j: abs(i - j) < SPAN and (i // p.size == j // p.size or j % p.size >= p.size - p.last)
    ),
    "fixed_heads": lambda m, x, p: by_head(
        x, lambda h, i, j: abs(i - j) < SPAN
        and (i // p.size == j // p.size if h < HEADS // 2 else j % p.size >= p.size - p.last),
    ),
    "image_1d": lambda m, x, p: seen(x, lambda i, j: -p.memory <= j - i // p.block * p.block < p.block + p.memory),
    "image_2d": lambda m, x, p: seen(x, lambda i, j: around_in_image(i, j, p)),
    "blockwise": blockwise,
    "big_bird": big_bird,
}  # fmt: skip
"""by the kind's name: (mechanism, x, parameters) → log weights"""
PATTERNS: dict[str, Oracle] = {
    "Window(4) | Global([0, 9])": lambda m, x: seen(
        x, lambda i, j: abs(i - j) < SPAN and (abs(i - j) < 4 or i in (0, 9) or j in (0, 9))
    ),
    "Window(6)": lambda m, x: seen(x, lambda i, j: abs(i - j) <= 5),
    "Every(5)": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and (i - j) % 5 == 0),
    "Block(6)": lambda m, x: seen(x, lambda i, j: i // 6 == j // 6),
    "Summary(6, 2)": lambda m, x: seen(x, lambda i, j: abs(i - j) < SPAN and j % 6 >= 4),
}
"""by the expression; the last four are the factors of strided and of fixed attention, a layer each"""
TWO_STREAMS = ("etc", "etc_projected")
"""kinds with tokens beside those of the text, whose oracle is `dense_models.two_streams`"""

BY_CONTENT = ("lsh", "routing")
"""kinds whose pairs depend on the queries, whose oracle is `content_oracle.by_content`"""


def parts(text: str) -> list[HeadSpec]:
    """The heads of a layer, as a run file writes it."""
    return parse_layer(text, HEADS, section=SECTION)


def log_weights(m, text: str, x: Tensor) -> Tensor:
    """What multiplies each weight of a layer, for a kind, a mixture or a pattern."""
    specs = parts(text)
    if len(specs) == 1:
        return _of(m, specs[0], x)
    each = zip(m.parts, specs, strict=True)
    return torch.cat([_of(part, spec, x).expand(-1, spec.heads, -1, -1) for part, spec in each], 1)


def _of(m, spec: HeadSpec, x: Tensor) -> Tensor:
    if spec.kind == PATTERN:
        assert spec.text in PATTERNS, f"the pattern {spec.text!r} has no dense oracle; add it to PATTERNS here"
        return PATTERNS[spec.text](m, x)
    assert spec.kind in ORACLES, f"the kind {spec.kind!r} has no dense oracle; add one to ORACLES in {__file__}"
    return ORACLES[spec.kind](m, x, spec.p)
