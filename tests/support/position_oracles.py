"""Every position encoding, written from its equation: scores of all pairs, in both directions.

Shapes: B batch, H heads, T tokens, D head size, L entries of a table. d [T, T] is i − j.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spanformer.kinds import POSITIONS

PER_LAYER = tuple(name for name, kind in POSITIONS.items() if kind.per_layer)
SCALED = {"rotary, linear": ("linear", 4.0, 0), "rotary, ntk": ("ntk", 4.0, 0), "rotary, yarn": ("yarn", 4.0, 300)}
"""rotary positions stretched: how, by which factor, and the length of training"""


def sinusoid(at: Tensor, dim: int) -> Tensor:
    """[…] → […, dim]"""
    waves = [at * 10000.0 ** (-(c - c % 2) / dim) for c in range(dim)]
    return torch.stack([wave.cos() if c % 2 else wave.sin() for c, wave in enumerate(waves)], -1)


def absolute(position, kind: str, x: Tensor, layer: int) -> Tensor | float:
    """What is added to the hidden states x [B, T, dim] before a layer, counted from 0."""
    if kind.startswith("sinusoidal"):
        waves = sinusoid(torch.arange(x.shape[1], dtype=torch.float64), x.shape[2])
        return waves + sinusoid(torch.tensor(layer + 1.0).double(), x.shape[2]) if kind in PER_LAYER else waves
    return position.weight[: x.shape[1]] if kind.startswith("learned") else 0.0


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


def rotated(x: Tensor, how: str, at: Tensor | None = None) -> Tensor:
    """At positions at [T], or 0 … T − 1."""
    half, at = x.shape[-1] // 2, torch.arange(x.shape[-2]).double() if at is None else at.double()
    angle = torch.stack([at * speed(c, half, how) for c in range(half)], -1)
    a, b = x[..., :half], x[..., half:]
    longer = 0.1 * math.log(SCALED[how][1]) + 1 if how == "rotary, yarn" else 1.0
    return longer * torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def bucket(d: int, causal: bool) -> int:
    """T5's 32 up to distance 128: without causality, the second half of them is for keys ahead."""
    count = 32 if causal else 16
    first, far, exact = count * (d < 0 and not causal), abs(d), count // 2
    if far < exact:
        return first + far
    return first + min(count - 1, exact + int(exact * math.log(far / exact) / math.log(128 / exact)))


def entry(d: Tensor, clip: int, causal: bool) -> Tensor:
    """Shaw's: from 0 on, or from −clip on."""
    return d.clamp(0, clip) if causal else d.clamp(-clip, clip) + clip


def with_vectors(q: Tensor, vectors: Tensor) -> Tensor:
    """q_i·r_ij / √D, vectors [T, T, D], or [H, T, T, D]"""
    return torch.einsum("bhid,hijd->bhij", q, vectors.expand(q.shape[1], *vectors.shape[-3:])) / math.sqrt(q.shape[3])


def table(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    """A table that knows no signs has an entry for |d|, the last one for all that are farther."""
    return content(q, k) + with_vectors(q, position.weight[d.abs().clamp(max=len(position.weight) - 1)])


def shaw(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    return content(q, k) + with_vectors(q, position.keys[entry(d, position.clip, causal)])


def transformer_xl(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    r = torch.einsum("ije,hde->hijd", sinusoid(d.double(), position.dim), position.weight)
    return content(q + position.u[:, None], k) + with_vectors(q + position.v[:, None], r)


def alibi(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    slope = torch.tensor([2.0 ** (-8 * (h + 1) / q.shape[1]) for h in range(q.shape[1])], dtype=torch.float64)
    return content(q, k) - slope[:, None, None] * d.abs()


def t5(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    index = torch.tensor([[bucket(n, causal) for n in row] for row in (d.clamp(min=0) if causal else d).tolist()])
    return content(q, k) + position.bias[:, index]


def distance_bias(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    return content(q, k) + position.bias[:, d.abs().clamp(max=position.bias.shape[1] - 1)]


def da_transformer(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    w, v = position.w[:, None, None], position.v[:, None, None]
    return content(q, k).relu() * (1 + v.exp()) / (1 + (v - w * d.abs()).exp())


def unchanged(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    return content(q, k)


SCORES: dict[str, Callable[..., Tensor]] = {
    **{name: unchanged for name, kind in POSITIONS.items() if kind.absolute},
    "table": table,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "alibi": alibi,
    "t5": t5,
    "distance_bias": distance_bias,
    "da_transformer": da_transformer,
}
"""by the encoding's name: (position, q, k, content, distances, causal) → scores; rotary ones are below"""


def scores(position, kind: str, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    """[B, H, T, T]; content(q, k) already divided by what it is to be divided by."""
    if kind.startswith("rotary"):
        return content(rotated(q, kind), rotated(k, kind))
    assert kind in SCORES, f"the position encoding {kind!r} has no dense oracle; add one to SCORES in {__file__}"
    return SCORES[kind](position, q, k, content, d, causal)


def values(position, kind: str, a: Tensor, d: Tensor, causal: bool) -> Tensor | float:
    """What weights a [B, H, T, T] add to the mixed values."""
    if kind != "shaw":
        return 0.0
    return torch.einsum("bhij,ijd->bhid", a, position.values[entry(d, position.clip, causal)])
