"""Tokens sorted by bucket, and what each sees of its own (`bucket_rounds` attends).

Sorted by (bucket, position), "the last w tokens of my bucket" is a window with buckets as documents. It depends on no
later token and needs no chunks.

Shapes: N rows (batch · heads), R rounds, T tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.rule import Rule

GAP = 1 << 32
"""places of neighbouring buckets are at least this far apart: more than any bucket or window holds"""


@dataclass(frozen=True)
class Seen:
    """What a token sees of its bucket."""

    reach: int
    """w, the tokens before it (itself among them, if it sees itself)"""
    itself: bool = False
    span: Tensor | None = None
    """[N] learned, in ranks: then `reach` is its limit"""
    ramp: float = 1.0
    scale: float = 1.0
    dropout: float = 0.0
    backend: str = "auto"

    def rule(self, tokens: int, **terms: object) -> Rule:
        """For rows that are batch rows of one head each."""
        span = None if self.span is None else self.span[:, None, None].expand(-1, -1, tokens)
        return Rule(
            1, reach=min(self.reach, GAP - 2), span=span, ramp=self.ramp, paper_compat=not self.itself,
            **terms,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip


@dataclass(frozen=True)
class Sorted:
    """Tokens sorted by (bucket, position), in each round."""

    order: Tensor
    """[N, R, T]: the token at each sorted place"""
    inverse: Tensor
    """[N, R, T]: the sorted place of each token"""
    groups: Tensor
    """[N, R, T]: bucket and document at each sorted place, ascending where no document ends"""
    places: Tensor
    """[R, N, T] of each token: pairs within reach in a round are as far apart here as in their bucket"""

    def rows(self, rows: slice) -> Sorted:
        return Sorted(self.order[rows], self.inverse[rows], self.groups[rows], self.places[:, rows])


def sort_tokens(ids: Tensor, documents: Tensor | None = None) -> Sorted:
    """ids [N, R, T] of buckets, 0 or more; documents [N, T]: tokens of others are not seen."""
    n, r, tokens = ids.shape
    rows = torch.arange(n * r, device=ids.device)[:, None]
    most = ids.amax() + 1 if ids.numel() else 1
    # One row of all: PyTorch sorts long rows of whole numbers by radix on a CPU.
    order = torch.sort((ids.reshape(n * r, tokens) + rows * most).flatten(), stable=True).indices
    order = (order.view(n * r, tokens) - rows * tokens).view(ids.shape)
    at = torch.arange(tokens, device=ids.device)
    inverse = torch.empty_like(order).scatter_(2, order, at.expand(order.shape))
    groups = ids.gather(2, order)
    if documents is not None:
        groups = groups + most * documents[:, None].expand(order.shape).gather(2, order)
    places = (inverse + ids * GAP).transpose(0, 1)
    return Sorted(order, inverse, groups, places)


@dataclass(frozen=True)
class Placed:
    """Tokens with their buckets; a memory adds where they are among earlier ones."""

    q: Tensor
    """[N, T, D]"""
    v: Tensor
    """[N, T, Dv]"""
    ids: Tensor
    """[N, R, T] buckets; from the number of buckets on, those of tokens that no other sees"""
    documents: Tensor | None
    """[N, T]"""
    real: Tensor
    """[B] tokens that are no padding"""
    k: Tensor | None = None
    """[N, T, D]"""
    among: Sorted | None = None
    ranks: Tensor | None = None
    """[N, R, T]: tokens of its bucket before each, from the text's beginning"""
    places: Tensor | None = None
    """[R, N, T]: bucket and rank in one number"""
    added: Tensor | None = None
    """[N, R, buckets]: new tokens of each"""


def near(apart: Tensor, seen: Seen) -> Tensor:
    """The weight of pairs of rows [N, …] whose places differ by this much, 0 where nothing is seen; the token itself
    aside."""
    d = apart - (0 if seen.itself else 1)
    shown = (apart > 0) & (d < seen.reach)
    if seen.span is None:
        return shown.float()
    span = seen.span.view(-1, *[1] * (apart.ndim - 1))
    soft = ((seen.ramp + span - d.clamp(max=1 << 20)) / seen.ramp).clamp(0, 1)
    return torch.where(shown, soft, 0)


def with_itself(found: Attended, own: Tensor, v: Tensor) -> Attended:
    """Rows that saw nothing see themselves. own: the score of a row with itself."""
    nothing, known = found.lse == -math.inf, torch.where(own.detach().isnan(), math.nan, 1.0).to(v.dtype)
    return Attended(
        torch.where(nothing[..., None], v * known[..., None], found.out),
        torch.where(nothing, own.to(found.lse.dtype), found.lse),
    )


def pick_rows(x: Tensor, index: Tensor) -> Tensor:
    """x [N, T, …], index [N, M] → [N, M, …], by one flat index: faster than gather."""
    n, t = x.shape[:2]
    flat = index + torch.arange(n, device=x.device)[:, None] * t
    return x.reshape(n * t, *x.shape[2:]).index_select(0, flat.flatten()).view(n, index.shape[1], *x.shape[2:])
