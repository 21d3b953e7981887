"""Attention over the keys that were chosen for each query, and how far the index is from it.

    a_ij = m(r_ij) · exp(s_ij) / Σ_{l ∈ S_i} m(r_il) · exp(s_il)        j ∈ S_i        s_ij = q_i·k_j / √D
    m(r) = clip((R + z − r) / R, 0, 1), if a budget z is learned: r = 0, 1, … is the rank of a key in S_i
    KL_i = Σ_{j ∈ S_i} t_ij · log(t_ij / x_ij)        t_i = mean_h softmax_{S_i}(s_i)        x_i = softmax_{S_i}(I_i)

t has no gradient. Keys are gathered for a block of queries at a time, and again in the backward pass.
Shapes: B batch, H query heads, Hkv key/value heads of G query heads each, T queries, N keys, K chosen keys, D and Dv
head sizes, J heads and E numbers of the index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.ops import dropout as dropping
from spanformer.ops.attended import Attended
from spanformer.ops.buckets import pick_rows

ROOM = 1 << 21
"""numbers of keys that are gathered at a time"""


@dataclass(frozen=True)
class Ranks:
    """A learned budget of keys."""

    span: Tensor
    """[H] z, in ranks"""
    ramp: float


class Index(NamedTuple):
    """What an index scores by; see index.py."""

    a: Tensor
    """[B, T, J, E]"""
    c: Tensor
    """[B, N, E]"""
    w: Tensor
    """[B, T, J]"""


class Options(NamedTuple):
    ramp: float
    dropout: float
    seed: Tensor | None
    taught: bool


def attend_chosen(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, ranks: Ranks | None = None, index: Index | None = None,
    dropout: float = 0.0, seed: Tensor | None = None,
) -> tuple[Attended, Tensor | None]:  # fmt: skip
    """q [B, H, T, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv], chosen [B, T, K] keys, best first, −1 for none. Returns out
    and lse, and with `index` the mean KL of all queries that see a key, with gradients to the index alone."""
    options = Options(1.0 if ranks is None else ranks.ramp, dropout, seed, index is not None)
    given = (None, None, None) if index is None else index
    out, lse, kl = _Chosen.apply(q, k, v, None if ranks is None else ranks.span, *given, chosen, options)
    return Attended(out, lse), kl if index is not None else None


class _Block(NamedTuple):
    """One block of queries with its keys."""

    at: Tensor
    """[B, t·K] keys, any for those that are not there"""
    real: Tensor
    """[B, t, 1, 1, K] bool"""
    q: Tensor
    """[B, t, Hkv, G, D]"""
    k: Tensor
    """[B, t, Hkv, K, D]"""
    v: Tensor
    """[B, t, Hkv, K, Dv]"""
    score: Tensor
    """[B, t, Hkv, G, K], −inf where there is no key"""
    mask: Tensor | None
    """[Hkv, G, K] m of every rank"""
    kept: Tensor | None
    """[B, t, Hkv, G, K] what dropout multiplies weights by"""

    @property
    def seen(self) -> Tensor:
        """[B, t, 1, 1] whether a query sees a key at all"""
        return self.real[:, :, 0, :, :1]

    @property
    def weighted(self) -> Tensor:
        return self.score if self.mask is None else self.score + self.mask.log()


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, span, a, c, w, chosen: Tensor, options: Options):
        b, h, t, _ = q.shape
        out, wide = v.new_empty(b, t, h, v.shape[3]), torch.promote_types(q.dtype, torch.float32)
        lse, kl = q.new_empty(b, t, h, dtype=wide), q.new_zeros((), dtype=wide)
        counted = q.new_zeros((), dtype=wide)
        for some in _slices(k, chosen):
            block = _gather(q, k, v, span, chosen, some, options)
            total = block.weighted.logsumexp(-1, keepdim=True)
            p = _weights(block.weighted, total)
            if options.taught:
                each, rows = _divergence(block, p, _pick_index(a, c, w, block.at, some))[:2]
                kl, counted = kl + each, counted + rows
            p = p if block.kept is None else p * block.kept
            out[:, some] = torch.where(block.seen, (p.to(v.dtype) @ block.v).flatten(2, 3), 0)
            lse[:, some] = total.flatten(2)
        ctx.save_for_backward(q, k, v, span, a, c, w, chosen, out, lse, counted)
        ctx.options, ctx.device = options, q.device.type
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), lse.transpose(1, 2), kl / counted.clamp(min=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_out, g_lse, g_kl):
        available = torch.amp.is_autocast_available(ctx.device)
        with torch.autocast(ctx.device, enabled=False) if available else nullcontext():  # it may run within autocast
            return _Chosen.gradients(ctx, g_out, g_lse, g_kl)

    @staticmethod
    def gradients(ctx: Any, g_out, g_lse, g_kl):
        q, k, v, span, a, c, w, chosen, out, lse, counted = ctx.saved_tensors
        (b, h, t, d), hkv, options = q.shape, k.shape[1], ctx.options
        g_out = torch.zeros_like(out) if g_out is None else g_out.transpose(1, 2)
        into = [q.new_zeros(b, t, h, d), *(x.new_zeros(x.transpose(1, 2).shape) for x in (k, v))]
        g_span = None if span is None else torch.zeros_like(span)
        taught = [torch.zeros_like(x) for x in (a, c, w)] if options.taught and g_kl is not None else [None] * 3
        for some in _slices(k, chosen):
            block = _gather(q, k, v, span, chosen, some, options)
            p = _weights(block.weighted, lse[:, some].unflatten(2, (hkv, -1))[..., None])
            if taught[0] is not None:
                index = _pick_index(a, c, w, block.at, some)
                error = _divergence(block, p, index)[2] * (g_kl / counted.clamp(min=1))
                _teach(taught, index, error.to(a.dtype), block.at, some)
            g = g_out[:, some].unflatten(2, (hkv, -1))  # [B, t, Hkv, G, Dv]
            delta = (g_out[:, some] * out[:, some]).sum(-1, dtype=lse.dtype)
            delta = delta if g_lse is None else delta - g_lse.transpose(1, 2)[:, some]
            g_p = (g @ block.v.transpose(-1, -2)).to(p.dtype)
            g_p = g_p if block.kept is None else g_p * block.kept
            g_s = torch.where(block.real, p * (g_p - delta.unflatten(2, (hkv, -1))[..., None]), 0)
            if block.mask is not None and g_span is not None:
                slope = torch.where((block.mask > 0) & (block.mask < 1), 1 / (options.ramp * block.mask), 0)
                g_span += (g_s * slope).sum((0, 1, 4)).flatten().to(g_span.dtype)
            g_s, p = (g_s / math.sqrt(d)).to(q.dtype), (p if block.kept is None else p * block.kept).to(v.dtype)
            into[0][:, some] = torch.where(block.seen, (g_s @ block.k).flatten(2, 3), 0)
            for to, rows in ((into[1], g_s.transpose(-1, -2) @ block.q), (into[2], p.transpose(-1, -2) @ g)):
                _add_rows(to, block.at, rows.transpose(2, 3).flatten(1, 2))
        return *(x.transpose(1, 2) for x in into), g_span, *taught, None, None


def _slices(k: Tensor, chosen: Tensor) -> Iterator[slice]:
    step = max(1, ROOM // max(1, k.shape[0] * k.shape[1] * k.shape[3] * chosen.shape[2]))
    return (slice(n, min(n + step, chosen.shape[1])) for n in range(0, chosen.shape[1], step))


def _gather(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None, chosen: Tensor, some: slice, o: Options) -> _Block:
    keys, hkv = chosen[:, some].long(), k.shape[1]
    real = (keys >= 0)[:, :, None, None]
    # a key that is not there stands for the best one, which the query sees: what it must not see may be NaN
    keys = torch.where(keys >= 0, keys, keys[..., :1]).clamp(min=0)
    size, at = keys.shape, keys.flatten(1)
    k, v = (pick_rows(x.transpose(1, 2), at).unflatten(1, size[1:]).transpose(2, 3) for x in (k, v))
    own = q.transpose(1, 2)[:, some].unflatten(2, (hkv, -1))
    score = (own @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[3])
    mask, kept = None, None
    if span is not None:
        rank = torch.arange(size[2], device=q.device)
        mask = ((o.ramp + span.detach()[:, None] - rank) / o.ramp).clamp(0, 1).to(score.dtype).unflatten(0, (hkv, -1))
    if o.dropout:
        assert o.seed is not None
        b, heads = size[0], torch.arange(size[0] * q.shape[1], device=q.device)
        heads = heads.view(b, 1, hkv, -1, 1)
        at_query = torch.arange(some.start, some.stop, device=q.device)[:, None, None, None]
        kept = dropping.keep(o.seed, o.dropout, heads, at_query, keys[:, :, None, None])
        kept = kept.to(score.dtype) / (1 - o.dropout)
    return _Block(at, real, own, k, v, torch.where(real, score, -math.inf), mask, kept)


def _weights(score: Tensor, lse: Tensor) -> Tensor:
    """exp(score − lse), 0 in rows that see nothing."""
    return (score - torch.where(lse == -math.inf, 0, lse)).exp()


def _pick_index(a: Tensor, c: Tensor, w: Tensor, at: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, the codes [B, t, K, E], w, and a·c [B, t, J, K] of a block."""
    a, w = a[:, some], w[:, some]
    codes = pick_rows(c, at).unflatten(1, (a.shape[1], -1))
    return a, codes, w, a @ codes.transpose(-1, -2)


def _divergence(block: _Block, p: Tensor, index: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of KL_i, the number of queries in it, and its gradient with respect to I [B, t, K]."""
    if block.mask is not None:  # the attention without the budget, which would teach the index what it says itself
        p = _weights(block.score, block.score.logsumexp(-1, keepdim=True))
    target, real = p.mean((2, 3)), block.real[:, :, 0, 0]
    _, _, w, products = index
    logits = (w[:, :, None] @ products.relu())[:, :, 0].to(target.dtype)
    log_x = torch.where(real, logits, -math.inf).log_softmax(-1)
    log_x = torch.where(real, log_x, 0)
    each = (target * (target.clamp(min=1e-30).log() - log_x)).sum(-1)
    counts = real[..., 0] & each.isfinite()
    error = torch.where(counts[..., None] & real, log_x.exp() - target, 0)
    return torch.where(counts, each, 0).sum(), counts.sum(), error


def _teach(into: list, index: tuple[Tensor, ...], error: Tensor, at: Tensor, some: slice) -> None:
    """Add the gradients of a, c and w, by that of I [B, t, K]."""
    a, codes, w, products = index
    known = (error != 0).any(-1, keepdim=True)[..., None]  # 0 · NaN is NaN
    a, products = torch.where(known, a, 0), torch.where(known, products, 0)
    into[2][:, some] += (products.relu() @ error[..., None])[..., 0]
    g = torch.where(products > 0, error[:, :, None] * w[..., None], 0)  # [B, t, J, K]
    into[0][:, some] += g @ codes
    _add_rows(into[1], at, (g.transpose(-1, -2) @ a).flatten(1, 2))


def _add_rows(to: Tensor, at: Tensor, rows: Tensor) -> None:
    """to [B, N, …] += rows [B, M, …] at [B, M]"""
    flat = at + torch.arange(len(at), device=at.device)[:, None] * to.shape[1]
    to.view(-1, *to.shape[2:]).index_add_(0, flat.flatten(), rows.flatten(0, 1))
