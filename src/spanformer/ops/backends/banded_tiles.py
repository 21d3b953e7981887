"""Tiles of the banded backend: what a step reads from whole tensors and adds to them, and what its queries see.

Shapes: B batch, h heads of a step, n chunks, C queries in a chunk, W keys in its window, X any last axis;
a tile of pairs is [B, h, n, C, W], or anything that broadcasts to it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops import dropout as dropping
from spanformer.ops.backends.banded_plan import Plan, Step, block_visible, ends
from spanformer.ops.rule import UNLIMITED
from spanformer.ops.tables import entry


class Learned(NamedTuple):
    """The tensors of a call that have gradients; see Call and Rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Tensor | None
    distance_bias: Tensor | None
    distance_vec: Tensor | None
    distance_scale: Tensor | None
    key_bias: Tensor | None
    key_span: Tensor | None
    sink_logits: Tensor | None


# Heads (axis 1): consecutive ones are a view, any others an index.


def _run(heads: tuple[int, ...]) -> bool:
    return heads == tuple(range(heads[0], heads[0] + len(heads)))


def pick(t: Tensor, heads: tuple[int, ...]) -> Tensor:
    if t.shape[1] == 1:  # the same for every head
        return t
    if _run(heads):
        return t.narrow(1, heads[0], len(heads))
    return t.index_select(1, torch.tensor(heads, device=t.device))


def accumulate(t: Tensor, heads: tuple[int, ...], value: Tensor) -> None:
    if _run(heads):
        t.narrow(1, heads[0], len(heads)).add_(value)
    else:  # heads of a group index one key head several times
        t.index_add_(1, torch.tensor(heads, device=t.device), value.to(t.dtype))


# Queries and keys (axis 2)


def take_q(t: Tensor, step: Step) -> Tensor:
    """[B, H, Tq, X] → [B, h, n, C, X]"""
    queries = t.narrow(2, step.start, step.chunks * step.size)
    return pick(queries, step.heads).unflatten(2, (step.chunks, step.size))


def put_q(t: Tensor, step: Step, tile: Tensor) -> None:
    """Each query of a head is in exactly one step, so this writes and never adds."""
    queries, tile = t.narrow(2, step.start, step.chunks * step.size), tile.flatten(2, 3).to(t.dtype)
    if _run(step.heads):
        queries.narrow(1, step.heads[0], len(step.heads)).copy_(tile)
    else:
        queries.index_copy_(1, torch.tensor(step.heads, device=t.device), tile)


def take_k(t: Tensor, step: Step, heads: tuple[int, ...]) -> Tensor:
    """[B, Hkv or H, Tk, X] → [B, h, n, W, X]; `heads`: for each head of the step, the index of t's head."""
    if step.columns is not None:
        return pick(t.index_select(2, step.columns), heads)[:, :, None]
    keys = t.narrow(2, step.lo, (step.chunks - 1) * step.size + step.width)
    return pick(keys, heads).unfold(2, step.width, step.size).transpose(-1, -2)


def add_k(t: Tensor, step: Step, heads: tuple[int, ...], tile: Tensor) -> None:
    """The reverse of take_k: it adds pieces of a chunk's length, because windows overlap and those do not."""
    if step.columns is not None:
        for i, head in enumerate(heads):
            t[:, head].index_add_(1, step.columns, tile[:, i, 0].to(t.dtype))
        return
    piece = step.width if step.chunks == 1 else step.size
    for at in range(0, step.width, piece):
        width = min(piece, step.width - at)
        keys = t.narrow(2, step.lo + at, (step.chunks - 1) * step.size + width)
        accumulate(keys.unfold(2, width, step.size).transpose(-1, -2), heads, tile[..., at : at + width, :])


def key_numbers(step: Step, device: torch.device) -> Tensor:
    """[n, W]"""
    if step.columns is not None:
        return step.columns[None]
    begins = step.lo + step.size * torch.arange(step.chunks, device=device)
    return begins[:, None] + torch.arange(step.width, device=device)


class Diagonals:
    """Where all chunks of a step have the same distances, d = far − x with x = C − 1 − c + w: a term of the distance
    alone is computed once per diagonal x, [1, h, 1, 1, C + W − 1], and expanded over the tile."""

    def __init__(self, plan: Plan, step: Step, device: torch.device) -> None:
        assert plan.offset is not None and step.columns is None
        self.size, self.width, self.count = step.size, step.width, step.size + step.width - 1
        last = plan.offset + step.start + step.size - 1 - plan.shift - step.lo
        d = last - torch.arange(self.count, device=device)
        self.near, self.far = ends(last - self.count + 1, last, plan.causal)
        self.d = (d if plan.causal else d.abs()).view(1, 1, 1, 1, -1)
        self.entry = entry(d, plan.causal, plan.max_future).view(1, 1, 1, 1, -1)

    def spread(self, t: Tensor) -> Tensor:
        return t[..., 0, :].unfold(-1, self.width, 1).flip(-2)

    def collect(self, tile: Tensor) -> Tensor:
        """The sum of a tile along each diagonal."""
        total = tile.sum((0, 2), keepdim=True)
        return self.to_queries(total).sum(-2, keepdim=True)

    def table_rows(self, length: int) -> Tensor:
        return self.entry.flatten().clamp(0, length - 1)

    def from_queries(self, t: Tensor) -> Tensor:
        """[.., C, C + W − 1], a number for each query and diagonal → [.., C, W]"""
        return self._skewed(t.contiguous())

    def to_queries(self, tile: Tensor) -> Tensor:
        t = tile.new_zeros(*tile.shape[:-1], self.count)
        self._skewed(t).copy_(tile)
        return t

    def _skewed(self, t: Tensor) -> Tensor:
        shape, strides = (*t.shape[:-1], self.width), (*t.stride()[:-2], self.count - 1, 1)
        return t.as_strided(shape, strides, t.storage_offset() + self.size - 1)


class Pairs:
    """Any positions: distances pair by pair, [1 or B, 1, 1 or n, C, W]."""

    def __init__(self, plan: Plan, step: Step, device: torch.device) -> None:
        if plan.offset is None:
            q = take_q(plan.q_positions[:, None, :, None], step)
            k = take_k(plan.k_positions[:, None, :, None], step, (0,)).transpose(-1, -2)
            self.near, self.far = -UNLIMITED, UNLIMITED
        else:  # all chunks of the step have the same distances as the first
            q = plan.offset + step.start + torch.arange(step.size, device=device).view(1, 1, 1, -1, 1)
            k = key_numbers(step, device)[:1].view(1, 1, 1, 1, -1)
            first = plan.offset + step.start - plan.shift
            last_key = plan.k_positions.shape[1] if step.columns is not None else step.lo + step.width
            self.near, self.far = ends(first - last_key + 1, first + step.size - 1 - step.lo, plan.causal)
        d = q - k - plan.shift
        self.d, self.limit = d if plan.causal else d.abs(), min(step.limit, self.far + 1)
        self.entry, self.max_future = entry(d, plan.causal, plan.max_future), plan.max_future

    def spread(self, t: Tensor) -> Tensor:
        return t

    def collect(self, tile: Tensor) -> Tensor:
        return _sum_to(tile, (self.d.shape[0], tile.shape[1], *self.d.shape[2:]))

    def table_rows(self, length: int) -> Tensor:
        self.least = max(0, self.max_future - self.limit + 1) if self.max_future else 0
        self.rows = max(1, min(length, self.max_future + self.limit) - self.least)
        return self.least + torch.arange(self.rows, device=self.entry.device)

    def from_queries(self, t: Tensor) -> Tensor:
        return t.gather(-1, self._index((*t.shape[:-1], self.d.shape[-1])))

    def to_queries(self, tile: Tensor) -> Tensor:
        return tile.new_zeros(*tile.shape[:-1], self.rows).scatter_add_(-1, self._index(tile.shape), tile)

    def _index(self, shape: tuple[int, ...]) -> Tensor:
        return (self.entry - self.least).clamp(0, self.rows - 1).expand(shape)


@dataclass
class Sight:
    """What the queries of a step see."""

    distances: Diagonals | Pairs
    hidden: list[Tensor] = field(default_factory=list)
    """bool tiles; a pair that is True in any of them has no weight"""
    biases: list[Tensor] = field(default_factory=list)
    """tiles to add to the scores"""
    slope: Tensor | None = None
    """d log m / d z on the ramp, 0 elsewhere: a tile, or expanded from diagonals"""
    key_slope: Tensor | None = None
    """the same for the keys' own spans, a tile"""
    factor: Tensor | None = None
    """a tile by which relu(scores) is multiplied"""

    def hide(self, tile: Tensor, value: float) -> Tensor:
        for mask in self.hidden:
            tile.masked_fill_(mask, value)
        return tile


def look(plan: Plan, x: Learned, step: Step, work: torch.dtype) -> Sight:
    device, heads, dynamic = x.q.device, step.heads, x.span is not None and x.span.ndim == 3
    regular = plan.offset is not None and step.columns is None and not dynamic
    distances = (Diagonals if regular else Pairs)(plan, step, device)
    seen, d, near, far = Sight(distances), distances.d, distances.near, distances.far
    hidden, biases = [], []  # terms of the distance alone
    if plan.causal and near < 0:
        hidden.append(d < 0)
    reach = [plan.reach[h] for h in heads]
    if min(reach) <= far:
        hidden.append(d >= torch.tensor(reach, device=device).view(1, -1, 1, 1, 1))
    if x.span is not None and (plan.least_span is None or min(plan.least_span[h] for h in heads) < far):
        gone, bias, seen.slope = _soft(_spans(step, x.span).to(work), d, plan.ramp)
        hidden.append(gone)
        biases.append(bias)
    if x.distance_bias is not None and x.distance_bias.shape[1]:
        biases.append(_read(x.distance_bias, distances, heads, work))
    if x.distance_scale is not None:
        seen.factor = distances.spread(_read(x.distance_scale, distances, heads, work))
    if hidden:
        seen.hidden.append(distances.spread(functools.reduce(torch.logical_or, hidden)))
    if biases:
        seen.biases.append(distances.spread(functools.reduce(torch.add, biases)))
    if x.key_bias is not None:
        own = tuple(h * x.key_bias.shape[1] // len(plan.reach) for h in heads)
        bias = take_k(x.key_bias[..., None], step, own).transpose(-1, -2).to(work)  # [1 or B, 1 or h, n, 1, W]
        seen.biases.append(bias)
        seen.hidden.append(bias == -math.inf)
    if x.key_span is not None and (plan.least_key_span is None or plan.least_key_span < far):
        e = take_k(x.key_span[..., None], step, heads).transpose(-1, -2).to(work)  # [1 or B, 1 or h, n, 1, W]
        gone, bias, seen.key_slope = _soft(e, distances.spread(d), plan.ramp)
        seen.hidden.append(gone)
        seen.biases.append(bias)
    if plan.q_documents is not None and plan.k_documents is not None:
        q_ids = take_q(plan.q_documents[:, None, :, None], step)
        seen.hidden.append(q_ids != take_k(plan.k_documents[:, None, :, None], step, (0,)).transpose(-1, -2))
    if plan.orders is not None:
        seen.hidden += (_in_other_order(plan, x, step, q, k) for q, k in zip(*plan.orders, strict=True))
    if plan.blocks is not None:
        q_pos = plan.q_positions[:, step.start : step.start + step.size]
        k_pos = plan.k_positions[:, key_numbers(step, device)[0]]
        seen.hidden.append(~block_visible(plan.blocks, heads[0], q_pos, k_pos)[:, None, None])
    return seen


def _spans(step: Step, span: Tensor) -> Tensor:
    return take_q(span[..., None], step) if span.ndim == 3 else pick(span[None], step.heads).view(1, -1, 1, 1, 1)


def _in_other_order(plan: Plan, x: Learned, step: Step, q: Tensor, k: Tensor) -> Tensor:
    """Where reach and span show a pair in another order of the tokens, at places q [1 or B, Tq] and k [1 or B, Tk]."""
    d = take_q(q[:, None, :, None], step) - take_k(k[:, None, :, None], step, (0,)).transpose(-1, -2) - plan.shift
    near = (d >= 0) & (d < torch.tensor([plan.reach[h] for h in step.heads], device=d.device).view(1, -1, 1, 1, 1))
    return near if x.span is None else near & ~_soft(_spans(step, x.span.detach()), d, plan.ramp)[0]


def _soft(z: Tensor, d: Tensor, ramp: float) -> tuple[Tensor, Tensor, Tensor]:
    """Where m = clip((ramp + z − d) / ramp, 0, 1) is 0, its log, and d log m / d z on the ramp, 0 elsewhere."""
    m = (z.clamp(min=ramp) - d + z.clamp(max=ramp)) / ramp  # the longer one first: near m = 0 that is exact
    return ~(m > 0), m.clamp(0, 1).log(), torch.where((m > 0) & (m < 1), 1 / (m * ramp), 0)


def _read(table: Tensor, distances: Diagonals | Pairs, heads: tuple[int, ...], work: torch.dtype) -> Tensor:
    """A table [H, L] at the step's distances, heads on axis 1."""
    own = pick(table[None], heads)[0].to(work)
    return own[:, distances.entry[:, 0].clamp(0, own.shape[1] - 1)].movedim(0, 1)


def kept(plan: Plan, step: Step) -> Tensor:
    """True where dropout keeps a weight."""
    assert plan.seed is not None and plan.numbers is not None
    heads = pick(plan.numbers.heads, step.heads)[:, :, None, None, None]
    queries = take_q(plan.numbers.queries[:, None, :, None], step)
    keys = take_k(plan.numbers.keys[:, None, :, None], step, (0,)).transpose(-1, -2)
    return dropping.keep(plan.seed, plan.dropout, heads, queries, keys)


def _sum_to(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    axes = [i for i, size in enumerate(shape) if size == 1 and t.shape[i] != 1]
    return t.sum(axes, keepdim=True) if axes else t


def nan_rows(t: Tensor) -> Tensor:
    """[.., X] → [.., 1]: NaN where a row has a number that is not finite, else 0."""
    return (t * 0).sum(-1, keepdim=True)


def zeroed(t: Tensor) -> Tensor:
    return t.nan_to_num(0, 0, 0)


def sink_of(x: Learned, step: Step, work: torch.dtype) -> Tensor | None:
    """[1, h, 1, 1, 1]"""
    return None if x.sink_logits is None else pick(x.sink_logits[None], step.heads).to(work).view(1, -1, 1, 1, 1)
