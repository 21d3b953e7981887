"""Attention among the tokens of a bucket, in several rounds of buckets, under one softmax.

    P_i = ∪_r {j : b_r(j) = b_r(i), 0 < n_r(i) − n_r(j) ≤ w}        n_r(i): how many of its bucket came before i
    out_i = Σ_{j ∈ P_i} exp(s_ij − lse_i) v_j

A pair that an earlier round has shown is hidden in later ones (`Rule.orders`), so that the union is exact. Nothing
sorted is kept for the backward pass: rounds are sorted again, some rows at a time. There a round needs no forward pass
of its own, since the gradient of a score follows from lse and out of all rounds: ds_ij = exp(s_ij − lse_i)·(g_i·v_j −
g_i·out_i + g_lse_i).

Shapes: N rows (batch · heads), R rounds, T tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops.attend import attend, part_gradients
from spanformer.ops.attended import Attended
from spanformer.ops.buckets import Seen, Sorted
from spanformer.ops.rule import Rule

ROOM = 1 << 20
"""numbers of q that are sorted at a time"""
SHORTEST = 1e-6
"""a query that is shorter is divided by this, and not by its length"""


def attend_buckets(q: Tensor, k: Tensor, v: Tensor, among: Sorted, seen: Seen) -> Attended:
    """q, k [N, T, D], v [N, T, Dv] → out [N, T, Dv], lse [N, T]; a row that sees nothing gives zeros and −inf. Where k
    is q, it is sorted once."""
    return Attended(*_Rounds.apply(q, None if k is q else k, v, seen.span, among, seen, _seed(seen), False))


def attend_alike(q: Tensor, v: Tensor, among: Sorted, seen: Seen) -> Attended:
    """The same with keys q / |q|; a row that sees nothing sees itself. Neither keys nor sorted tensors are kept."""
    return Attended(*_Rounds.apply(q, None, v, seen.span, among, seen, _seed(seen), True))


def _seed(seen: Seen) -> int:
    return int(torch.randint(1 << 48, ())) if seen.dropout else 0


class _Rounds(torch.autograd.Function):
    """Rounds one after the other, added up by lse. k None: keys are the queries, of length 1 if `unit`."""

    @staticmethod
    def forward(ctx, q, k, v, span, among: Sorted, seen: Seen, seed: int, unit: bool):
        q, v = q.contiguous(), v.contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = v.new_empty(v.shape), q.new_empty(q.shape[:2], dtype=wide)
        inverse = 1 / torch.linalg.vector_norm(q, dim=-1, dtype=wide).clamp(min=SHORTEST) if unit else None
        for rows in _pieces(q):
            some = _Piece(q, k, v, span, inverse, among, seen, rows, seed)
            to, to_lse = out[rows], lse[rows]
            for n in range(among.order.shape[1]):
                found, back = some.attend(n), some.back(n)
                if n == 0:
                    _rows(found.out, back, to)
                    to_lse.copy_(_numbers(found.lse, back).view(to_lse.shape))
                    continue
                more_lse = _numbers(found.lse, back).view(to_lse.shape)
                total = torch.logaddexp(to_lse, more_lse)
                to.lerp_(_rows(found.out, back).view(to.shape), _share(more_lse, total)[..., None].to(to.dtype))
                to_lse.copy_(total)
        alone = None
        if inverse is not None:
            alone = lse == -math.inf
            own = inverse.reciprocal()  # |q|, the score of a row with itself
            known = torch.where(own.isnan(), math.nan, 1.0).to(v.dtype)
            torch.where(alone[..., None], v * known[..., None], out, out=out)
            torch.where(alone, own, lse, out=lse)
        ctx.save_for_backward(q, k, v, span, out, lse, inverse, alone)
        ctx.among, ctx.seen, ctx.seed = among, seen, seed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_out, g_lse):
        q, k, v, span, out, lse, inverse, alone = ctx.saved_tensors
        g_out = torch.zeros_like(out) if g_out is None else g_out.contiguous()
        grads = [torch.empty_like(t) for t in (q, v)]
        dq, dv, dk = *grads, None if k is None else torch.empty_like(k)
        d_span = None if span is None else torch.zeros_like(span)
        for rows in _pieces(q):
            some = _Piece(q, k, v, span, inverse, ctx.among, ctx.seen, rows, ctx.seed)
            spread = torch.linalg.vecdot(g_out[rows], out[rows]).to(lse.dtype).neg_()
            spread = spread if g_lse is None else spread.add_(g_lse[rows])
            reached = lse[rows]
            if alone is not None:  # rows that saw nothing have no weight in any bucket
                reached = torch.where(alone[rows], -math.inf, reached)
            into = [dq[rows], dv[rows]]
            if k is not None or inverse is not None:
                into.append(torch.empty_like(q[rows]) if dk is None else dk[rows])
            for n in range(ctx.among.order.shape[1]):
                found, of_span = some.gradients(n, g_out[rows], reached, spread)
                if len(into) == 2:  # one vector is query and key
                    found[0].add_(found.pop())
                back = some.back(n)
                for to, grad in zip(into, found, strict=True):
                    if n == 0:
                        _rows(grad, back, to)
                    else:
                        to.add_(_rows(grad, back).view(to.shape))
                if d_span is not None and of_span is not None:
                    d_span[rows] += of_span
            if inverse is not None and alone is not None:
                into[0] += _unit_gradient(q[rows], inverse[rows], into[2])
                into[1] += torch.where(alone[rows][..., None], g_out[rows], 0)
                if g_lse is not None:
                    to_own = torch.where(alone[rows], g_lse[rows] * inverse[rows], 0)
                    into[0] += q[rows] * to_own[..., None].to(q.dtype)
        return dq, dk, dv, d_span, None, None, None, None


def _unit_gradient(q: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """The gradient of q / |q| becomes that of q, in place."""
    along = (torch.linalg.vecdot(grad, q).to(inverse.dtype) * inverse.square())[..., None].to(q.dtype)
    return grad.addcmul_(q, along, value=-1).mul_(inverse[..., None].to(q.dtype))


def _rows(x: Tensor, at: Tensor, to: Tensor | None = None) -> Tensor:
    """Rows `at` of x [N, …, T, D] as [N·T, D], in `to` if given."""
    x = x.reshape(-1, x.shape[-1])
    return x.index_select(0, at) if to is None else torch.index_select(x, 0, at, out=to.view(-1, to.shape[-1]))


def _numbers(x: Tensor, at: Tensor) -> Tensor:
    """The same of x [N, …, T]."""
    return x.reshape(-1).index_select(0, at)


class _Piece:
    """Some rows, and one round of them at a time in sorted order."""

    def __init__(
        self, q: Tensor, k: Tensor | None, v: Tensor, span: Tensor | None, inverse: Tensor | None, among: Sorted,
        seen: Seen, rows: slice, seed: int,
    ) -> None:  # fmt: skip
        self.q, self.v = q[rows], v[rows]
        self.k, self.inverse = (None if t is None else t[rows] for t in (k, inverse))
        self.among, self.seed = among.rows(rows), seed + rows.start
        self.seen = replace(seen, span=None if span is None else span[rows].detach())
        n, t = self.q.shape[:2]
        self.first = torch.arange(n, device=q.device)[:, None] * t

    def order(self, n: int) -> Tensor:
        """[N·T]: the rows of flattened tokens, in the order of round n."""
        return (self.among.order[:, n] + self.first).flatten()

    def back(self, n: int) -> Tensor:
        """[N·T]: the rows of sorted tokens, in the order of the text."""
        return (self.among.inverse[:, n] + self.first).flatten()

    def sorted(self, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [N, 1, T, D]"""
        q, v = _rows(self.q, order), _rows(self.v, order)
        k = q if self.k is None else _rows(self.k, order)
        if self.inverse is not None:
            k = q * _numbers(self.inverse, order)[:, None].to(q.dtype)
        return self._parted(q), self._parted(k), self._parted(v)

    def _parted(self, t: Tensor) -> Tensor:
        """[N·T, D] → [N, 1, T, D]"""
        return t.view(len(self.q), 1, -1, t.shape[1])

    def rule(self, n: int, seen: Seen) -> Rule:
        order = self.among.order[:, n]
        before = torch.stack([p.gather(1, order) for p in self.among.places[:n]]) if n else None
        orders = None if before is None else (before, before)
        return seen.rule(order.shape[1], documents=self.among.groups[:, n], orders=orders)

    def generator(self, n: int) -> torch.Generator | None:
        return torch.Generator().manual_seed(self.seed * 64 + n) if self.seen.dropout else None

    def attend(self, n: int) -> Attended:
        """Round n: out [N, 1, T, Dv], lse [N, 1, T], in sorted order."""
        return self._attend(*self.sorted(self.order(n)), n, self.seen)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, n: int, seen: Seen) -> Attended:
        return attend(
            q, k, v, self.rule(n, seen), scale=seen.scale, dropout=seen.dropout, generator=self.generator(n),
            backend=seen.backend,
        )  # fmt: skip

    def gradients(
        self, n: int, g_out: Tensor, lse: Tensor, spread: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
        """Round n of q, v and k [N, 1, T, D], in sorted order, and of the span. lse [N, T]: of all rounds; spread:
        g_lse − g_out·out."""
        order, seen = self.order(n), self.seen
        q, k, v = self.sorted(order)
        g_out = self._parted(_rows(g_out, order))
        lse, spread = (_numbers(t, order).view(g_out.shape[:3]) for t in (lse, spread))
        found = part_gradients(
            q, k, v, self.rule(n, seen), g_out, lse, spread, scale=seen.scale, dropout=seen.dropout,
            generator=self.generator(n), backend=seen.backend,
        )  # fmt: skip
        if found is not None:
            dq, dk, dv, of_span = found
            return [dq, dv, dk], None if of_span is None else of_span.sum((1, 2))
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        span = None if seen.span is None else seen.span.requires_grad_()
        with torch.enable_grad():
            out, part = self._attend(q, k, v, n, replace(seen, span=span))
        share = _share(part.detach(), lse)
        to_lse = torch.linalg.vecdot(g_out, out.detach()).to(part.dtype) + spread
        toward = [g_out * share[..., None].to(g_out.dtype), share * to_lse]
        dq, dk, dv, *of_spans = torch.autograd.grad([out, part], [q, k, v, *([] if span is None else [span])], toward)
        return [dq, dv, dk], of_spans[0] if of_spans else None


def _share(part: Tensor, total: Tensor) -> Tensor:
    """exp(part − total), 0 where nothing was seen at all."""
    return torch.where(total == -math.inf, 0, (part - total).exp())


def _pieces(q: Tensor) -> list[slice]:
    """Rows in pieces of at most ROOM numbers, or single ones."""
    step = max(1, ROOM // max(1, q.shape[1] * q.shape[2]))
    return [slice(n, n + step) for n in range(0, q.shape[0], step)]
