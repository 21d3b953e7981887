"""Attention among the tokens of a bucket, in several rounds of buckets, under one softmax.

    P_i = ∪_r {j : b_r(j) = b_r(i), 0 < n_r(i) − n_r(j) ≤ w}        n_r(i): how many of its bucket came before i
    out_i = Σ_{j ∈ P_i} exp(s_ij − lse_i) v_j

Sorted by (bucket, position), "the last w tokens of my bucket" is a window with buckets as documents. It depends on no
later token and needs no chunks. A pair that an earlier round has shown is hidden in later ones (`Rule.orders`), so that
the union is exact. Nothing sorted is kept for the backward pass: rounds are sorted again, some rows at a time.

Shapes: N rows (batch · heads), R rounds, T tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spanformer.ops.attend import attend
from spanformer.ops.attended import Attended
from spanformer.ops.rule import Rule

GAP = 1 << 32
"""places of neighbouring buckets are at least this far apart: more than any bucket or window holds"""
ROOM = 1 << 20
"""numbers of q that are sorted at a time"""


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
    tokens = ids.shape[2]
    at = torch.arange(tokens, device=ids.device)
    packed, order = torch.sort(ids * tokens + at)  # one key of both, so that the sort need not be stable
    inverse = torch.empty_like(order).scatter_(2, order, at.expand(order.shape))
    groups = packed.div_(max(tokens, 1), rounding_mode="floor")
    if documents is not None:
        groups = groups + (ids.amax() + 1) * documents[:, None].expand(order.shape).gather(2, order)
    places = (inverse + ids * GAP).transpose(0, 1)
    return Sorted(order, inverse, groups, places)


def attend_buckets(q: Tensor, k: Tensor, v: Tensor, among: Sorted, seen: Seen) -> Attended:
    """q, k [N, T, D], v [N, T, Dv] → out [N, T, Dv], lse [N, T]; a row that sees nothing gives zeros and −inf."""
    seed = int(torch.randint(1 << 48, ())) if seen.dropout else 0
    return Attended(*_Rounds.apply(q, k, v, seen.span, among, seen, seed))


@dataclass(frozen=True)
class Placed:
    """Tokens with their buckets; a memory adds where they are among earlier ones."""

    q: Tensor
    """[N, T, D]"""
    k: Tensor
    v: Tensor
    """[N, T, Dv]"""
    ids: Tensor
    """[N, R, T] buckets; from the number of buckets on, those of tokens that no other sees"""
    documents: Tensor | None
    """[N, T]"""
    real: Tensor
    """[B] tokens that are no padding"""
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


class _Rounds(torch.autograd.Function):
    """Rounds one after the other, added up by lse."""

    @staticmethod
    def forward(ctx, q, k, v, span, among: Sorted, seen: Seen, seed: int):
        out, lse = v.new_empty(v.shape), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows in _pieces(q):
            some, spans = among.rows(rows), None if span is None else span[rows]
            for n in range(among.order.shape[1]):
                order, back = some.order[:, n], some.inverse[:, n]
                sorted_ = [pick_rows(t[rows], order) for t in (q, k, v)]
                found = _round(sorted_, some, replace(seen, span=spans), n, seed + rows.start)
                one = pick_rows(found.out[:, 0], back), found.lse[:, 0].gather(1, back)
                out[rows], lse[rows] = _add(out[rows], lse[rows], *one) if n else one
        ctx.save_for_backward(q, k, v, span, out, lse)
        ctx.among, ctx.seen, ctx.seed = among, seen, seed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_out, g_lse):
        """Each round again; out and lse of all give its share of every gradient."""
        q, k, v, span, out, lse = ctx.saved_tensors
        among, seen, seed = ctx.among, ctx.seen, ctx.seed
        into = [torch.zeros_like(t) for t in (q, k, v, *([] if span is None else [span]))]
        g_out = torch.zeros_like(out) if g_out is None else g_out
        for rows in _pieces(q):
            some, delta = among.rows(rows), (g_out[rows] * out[rows]).sum(-1, dtype=lse.dtype)
            delta = delta if g_lse is None else delta - g_lse[rows]
            for n in range(among.order.shape[1]):
                order, back = some.order[:, n], some.inverse[:, n]
                leaves = [pick_rows(t[rows].detach(), order).requires_grad_() for t in (q, k, v)]
                spans = None if span is None else span[rows].detach().requires_grad_()
                with torch.enable_grad():
                    found = _round(leaves, some, replace(seen, span=spans), n, seed + rows.start)
                g, share = pick_rows(g_out[rows], order), _share(found.lse[:, 0].detach(), lse[rows].gather(1, order))
                to_lse = (g * found.out[:, 0].detach()).sum(-1, dtype=lse.dtype) - delta.gather(1, order)
                toward = [(g * share[..., None].to(g.dtype))[:, None], (share * to_lse)[:, None]]
                inputs = [*leaves, *([] if spans is None else [spans])]
                grads = torch.autograd.grad([found.out, found.lse], inputs, toward)
                for to, grad in zip(into, grads, strict=True):
                    to[rows] += grad if grad.ndim == 1 else pick_rows(grad, back)
        return *into, *([] if span is not None else [None]), None, None, None


def _round(qkv: list[Tensor], among: Sorted, seen: Seen, n: int, seed: int) -> Attended:
    """Round n of sorted tokens, three of [N, T, D] → out [N, 1, T, Dv], lse [N, 1, T], in sorted order."""
    order = among.order[:, n]
    before = torch.stack([p.gather(1, order) for p in among.places[:n]]) if n else None
    orders = None if before is None else (before, before)
    rule = seen.rule(order.shape[1], documents=among.groups[:, n], orders=orders)
    generator = torch.Generator().manual_seed(seed * 64 + n) if seen.dropout else None
    q, k, v = (t[:, None] for t in qkv)
    return attend(
        q, k, v, rule, scale=seen.scale, dropout=seen.dropout, generator=generator, backend=seen.backend
    )  # fmt: skip


def _add(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax."""
    total = torch.logaddexp(lse, more_lse)
    return torch.lerp(out, more, _share(more_lse, total)[..., None].to(out.dtype)), total


def _share(part: Tensor, total: Tensor) -> Tensor:
    """exp(part − total), 0 where nothing was seen at all."""
    return torch.where(total == -math.inf, 0, (part - total).exp())


def _pieces(q: Tensor) -> list[slice]:
    """Rows in pieces of at most ROOM numbers, or single ones."""
    step = max(1, ROOM // max(1, q.shape[1] * q.shape[2]))
    return [slice(n, n + step) for n in range(0, q.shape[0], step)]
