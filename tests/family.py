"""One layer of every mechanism with every position encoding, written from their equations: all pairs, in float64.

Shapes: B batch, H heads, T tokens, D head size. d is i − j, [T, T].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.model.lm import LM

T, SPAN, RAMP, WINDOW = 37, 23, 5.0, 9


def distances() -> Tensor:
    at = torch.arange(T)
    return at[:, None] - at[None, :]


# ---- mechanisms: log of what multiplies each weight, [B or 1, H or 1, T, T]; −inf where nothing is seen


def seen(visible) -> Tensor:
    """From a definition of pairs (i, j), causality aside."""
    rows = [[0.0 if visible(i, j) and j <= i else -math.inf for j in range(T)] for i in range(T)]
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def ramped(z: Tensor) -> Tensor:
    m = ((RAMP + z - distances()) / RAMP).clamp(0, 1)
    return torch.where(distances() >= 0, m, 0).log()


def block(size: int):
    return lambda i, j: i // size == j // size


def by_head(visible) -> Tensor:
    return torch.cat([seen(lambda i, j, h=h: visible(h, i, j)) for h in range(4)], 1)


def around_in_image(i: int, j: int) -> bool:
    """Width 6, tokens in the order of blocks of 2 × 3; a block sees itself, 1 line above and 2 columns beside."""

    def pixel(t: int) -> tuple[int, int]:
        number, within = divmod(t, 6)
        return number // 2 * 2 + within // 3, number % 2 * 3 + within % 3

    (line, column), (top, left) = pixel(j), pixel(i // 6 * 6)
    return top - 1 <= line < top + 2 and left - 2 <= column < left + 3 + 2


def big_bird(random: list[list[list[bool]]]) -> Tensor:
    return by_head(lambda h, i, j: i - j < SPAN and (abs(i // 4 - j // 4) <= 1 or min(i, j) < 4 or random[h][i][j]))


def drawn(m, head: int) -> list[list[bool]]:
    """The random part, whatever was drawn; that the draws are right is tested beside them."""
    at, random = torch.arange(T), m.patterns[head].parts[-1]
    return random.visible(at[:, None], at[None], causal=True, length=T).tolist()


def kept_and(inner: Tensor, kept: int) -> Tensor:
    return torch.maximum(inner, seen(lambda i, j: j < kept))


def span_of(m) -> Tensor:
    return (m.ratio * m.max_span)[None, :, None, None]


def expiring(m, x: Tensor) -> Tensor:
    return ramped((m.max_span * (x @ m.weight[0] + m.bias).sigmoid())[:, None, None, :])


def forgetting(m, x: Tensor) -> Tensor:
    gates = F.logsigmoid(x @ m.weight.T + m.bias).transpose(1, 2)  # [B, H, T]
    between = torch.stack([
        torch.stack([gates[..., j + 1 : i + 1].sum(-1) if j <= i else gates[..., 0] for j in range(T)], -1)
        for i in range(T)
    ], -2)  # fmt: skip
    return between + seen(lambda i, j: i - j < SPAN)


MECHANISMS = {
    "adaptive_span": lambda m, x: ramped(span_of(m)),
    "dynamic_span": lambda m, x: ramped((m.max_span * (x @ m.weight.T + m.bias).sigmoid()).transpose(1, 2)[..., None]),
    "window:9": lambda m, x: seen(lambda i, j: i - j < 9),
    "full": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "longformer:8": lambda m, x: seen(lambda i, j: i - j < 8),
    "longformer:6:2": lambda m, x: seen(lambda i, j: i - j < (SPAN if j < 2 else 6)),
    "expire_span": lambda m, x: expiring(m, x),
    "forgetting": lambda m, x: forgetting(m, x),
    "sink_window:6:2": lambda m, x: kept_and(seen(lambda i, j: i - j < 6), 2),
    "sink_span:2": lambda m, x: kept_and(ramped(span_of(m.inner)), 2),
    "dot": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "general": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "bilinear": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "additive": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "chunked": lambda m, x: seen(lambda i, j: i - j < SPAN),
    "dilated:4:3": lambda m, x: seen(lambda i, j: (i - j) % 3 == 0 and (i - j) // 3 < 4),
    "strided:5": lambda m, x: seen(lambda i, j: i - j < SPAN and (i - j <= 5 or (i - j) % 5 == 0)),
    "strided_heads:5": lambda m, x: by_head(
        lambda h, i, j: i - j < SPAN and (i - j <= 5 if h < 2 else (i - j) % 5 == 0)
    ),
    "fixed:6:2": lambda m, x: seen(lambda i, j: i - j < SPAN and (i // 6 == j // 6 or j % 6 >= 4)),
    "fixed_heads:6:2": lambda m, x: by_head(
        lambda h, i, j: i - j < SPAN and (i // 6 == j // 6 if h < 2 else j % 6 >= 4)
    ),
    "image_1d:8:4": lambda m, x: seen(lambda i, j: i // 8 == j // 8 or 0 < i // 8 * 8 - j <= 4),
    "image_2d:6:2:3:1:2": lambda m, x: seen(around_in_image),
    "blockwise:3:4": lambda m, x: by_head(
        lambda h, i, j: i // 12 == j // 12 and j // 4 % 3 == (i // 4 % 3 - (0, 0, 1, 2)[h]) % 3
    ),
    "big_bird:4:3:1:1": lambda m, x: big_bird([drawn(m, h) for h in range(4)]),
    "Window(4) | Global([0, 9])": lambda m, x: seen(
        lambda i, j: i - j < SPAN and (i - j < 4 or i in (0, 9) or j in (0, 9))
    ),
    "2 window:9 + 2 adaptive_span": lambda m, x: torch.cat(
        [seen(lambda i, j: i - j < 9).expand(1, 2, T, T), ramped(span_of(m.parts[1]))], 1
    ),
}


# ---- positions


def absolute(position, kind: str, dim: int) -> Tensor | float:
    if kind == "sinusoidal":
        angle = [[t * 10000.0 ** (-(c - c % 2) / dim) for c in range(dim)] for t in range(T)]
        return torch.tensor(
            [[math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(row)] for row in angle], dtype=torch.float64
        )
    return position.weight[:T] if kind.startswith("learned") else 0.0


SCALED = {"rotary, linear": ("linear", 4.0, 0), "rotary, ntk": ("ntk", 4.0, 0), "rotary, yarn": ("yarn", 4.0, 300)}
"""rotary positions stretched: how, by which factor, and the length of training"""


def speed(c: int, half: int, how: str) -> float:
    """By how much pair c of `half` turns from one token to the next."""
    scaling, factor, trained = SCALED.get(how, ("none", 1.0, 0))
    base = 10000.0 * factor ** (half / (half - 1)) if scaling == "ntk" else 10000.0
    plain = base ** (-c / half)
    if scaling == "linear":
        return plain / factor
    if scaling == "yarn":  # pairs between those of 32 turns in the trained length and of one are mixed
        with_turns = lambda turns: half * math.log(trained / (turns * 2 * math.pi)) / math.log(base)  # noqa: E731
        first, last = max(math.floor(with_turns(32)), 0), min(math.ceil(with_turns(1)), 2 * half - 1)
        slow = min(max((c - first) / (last - first), 0), 1)
        return plain * (1 - slow) + plain / factor * slow
    return plain


def rotated(x: Tensor, how: str) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.tensor([[t * speed(c, half, how) for c in range(half)] for t in range(T)], dtype=torch.float64)
    a, b = x[..., :half], x[..., half:]
    longer = 0.1 * math.log(SCALED[how][1]) + 1 if how == "rotary, yarn" else 1.0
    return longer * torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def bucket(d: int) -> int:
    return d if d < 16 else min(31, 16 + int(16 * math.log(d / 16) / math.log(128 / 16)))


def by_distance(table: Tensor) -> Tensor:
    """table [.., L, ..] over distances on axis −2 or −1 given as [H, L] → [H, T, T]"""
    return table[:, distances().clamp(0, table.shape[1] - 1)]


def with_vectors(q: Tensor, vectors: Tensor) -> Tensor:
    """q_i·r[d], vectors [1 or H, L, D]"""
    return torch.einsum("bhid,hijd->bhij", q, by_distance(vectors).expand(q.shape[1], T, T, q.shape[3]))


def scores(position, kind: str, q: Tensor, k: Tensor, content) -> Tensor:
    """[B, H, T, T]; content(q, k) already divided by what it is to be divided by."""
    root = math.sqrt(q.shape[3])
    heads = q.shape[1]
    if kind.startswith("rotary"):
        return content(rotated(q, kind), rotated(k, kind))
    if kind == "table":
        return content(q, k) + with_vectors(q, position.weight[None]) / root
    if kind == "shaw":
        return content(q, k) + with_vectors(q, position.keys[None]) / root
    if kind == "transformer_xl":
        dim = position.dim
        sinusoid = torch.tensor(
            [[math.cos(a) if c % 2 else math.sin(a) for c, a in ((c, t * 10000.0 ** (-(c - c % 2) / dim))
                                                                 for c in range(dim))] for t in range(T)],
            dtype=torch.float64,
        )  # fmt: skip
        r = torch.einsum("le,hde->hld", sinusoid, position.weight)
        return content(q + position.u[:, None], k) + with_vectors(q + position.v[:, None], r) / root
    if kind == "alibi":
        slope = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
        return content(q, k) - slope[:, None, None] * distances()
    if kind == "t5":
        index = torch.tensor([[bucket(max(i - j, 0)) for j in range(T)] for i in range(T)])
        return content(q, k) + position.bias[:, index]
    if kind == "distance_bias":
        return content(q, k) + by_distance(position.bias)
    if kind == "da_transformer":
        w, v = position.w[:, None, None], position.v[:, None, None]
        return content(q, k).relu() * (1 + v.exp()) / (1 + (v - w * distances().clamp(min=0)).exp())
    return content(q, k)


# ---- the layer


def content_of(mechanism, name: str):
    if name == "additive":
        return lambda q, k: (
            ((q @ mechanism.query)[..., :, None, :] + (k @ mechanism.key)[..., None, :, :]).tanh() @ mechanism.vector
        )
    return lambda q, k: q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])


def mapped(mechanism, name: str, q: Tensor) -> Tensor:
    """q as the scorings that are a product with something other than q see it; positions then meet this query."""
    if name == "dot":
        return q * math.sqrt(q.shape[3])
    if name == "general":
        return q @ mechanism.weight * math.sqrt(q.shape[3])
    if name == "bilinear":
        return (q @ mechanism.weight + mechanism.bias) * math.sqrt(q.shape[3])
    return q


def logits(lm: LM, tokens: Tensor, mechanism_name: str, position_name: str) -> Tensor:
    """[B, T, V] of a language model of one layer, without feed-forward, norms before."""
    layer, position = lm.blocks[0].attention, lm.positions()[0]  # pyright: ignore
    heads, dim = layer.heads, lm.config.dim
    h = lm.embedding.weight[tokens] + absolute(position, position_name, dim)  # pyright: ignore
    x = rms(h, lm.blocks[0].norm1.weight)  # pyright: ignore
    m = layer.mechanism

    def split(p) -> Tensor:
        return (x @ p.weight.T).view(len(x), T, heads, dim // heads).transpose(1, 2)

    def mixed(q: Tensor, k: Tensor, v: Tensor, seen_by: Tensor) -> Tensor:
        weight = (scores(position, position_name, q, k, content_of(m, mechanism_name)) + seen_by).exp()
        total = weight.sum(-1, keepdim=True)
        if getattr(m, "sinks", None) is not None:
            total = total + m.sinks.exp()[:, None, None]
        a = weight / torch.where(total == 0, 1, total)  # a row that sees nothing is zeros
        if position_name != "shaw":
            return a @ v
        near = position.values[distances().clamp(0, position.clip)]
        return a @ v + torch.einsum("bhij,ijd->bhid", a, near)

    q = mapped(m, mechanism_name, split(layer.query))
    out = mixed(q, split(layer.key), split(layer.value), MECHANISMS[mechanism_name](m, x))
    if getattr(m, "positions", ()):  # Longformer's global tokens, the first ones here, have projections of their own
        own = mixed(split(m.query), split(m.key), split(m.value), seen(lambda i, j: i - j < SPAN))
        first = len(m.positions)
        out = torch.cat([own[:, :, :first], out[:, :, first:]], 2)
    h = h + out.transpose(1, 2).reshape(len(x), T, dim) @ layer.out.weight.T
    return rms(h, lm.norm.weight) @ lm.head.weight.T  # pyright: ignore


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
