"""Efficient Content-Based Sparse Attention with Routing Transformers (Roy, Saffar, Vaswani, Grangier, 2020).
https://arxiv.org/abs/2003.05997

    x = LayerNorm(q), without scale and bias        c(x) = argmax_c x·μ_c        s_ij = x_i·x_j / √D
    a_ij ∝ exp(s_ij), j among the last w tokens of cluster c(x_i), i itself included
    μ_c: moving average of the x of its tokens        loss += β · mean ‖x − μ_c(x)‖²

The paper lets each cluster take its w nearest tokens, so that later tokens push earlier ones out. Here a token is in
exactly one cluster and sees its past; the paper's form serves encoders (routing_top.py). The paper's code scales q
before LayerNorm, which undoes it; here 1/√D multiplies the scores.
Shapes: B batch, H heads, T tokens, C clusters, D head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.base import View, own_output
from spanformer.attention.bucketed import Bucketed
from spanformer.attention.routing_top import attend_top
from spanformer.core.recompute import recomputing, to_be_recomputed
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.ops import AnyRule, Attended
from spanformer.ops.buckets import Placed, Seen

SMOOTH = 1e-5  # added to every count: a cluster without tokens keeps its centroid
COLLAPSED = 0.5  # of the entropy of even clusters


class Occupancy(NamedTuple):
    """How the tokens of the last step spread over clusters; of all heads."""

    least: float
    """the smallest share of a head's tokens in a cluster"""
    most: float
    entropy: float
    """bits, the mean of all heads; log2 of the clusters if they are even"""


class Routing(Bucketed):
    """Centroids are buffers: `after_step` moves them, once per optimiser step. `causal=False`: the paper's form."""

    centroids: Tensor
    """[H, C, D]"""
    sums: Tensor
    """[H, C, D] and counts [H, C]: moving averages, whose quotient the centroids are"""
    counts: Tensor

    def __init__(
        self, heads: int, head_dim: int, window: int, *, clusters: int = 16, decay: float = 0.999,
        commitment: float = 1e-4, seed: int = 0, causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(heads, window, clusters, 1)
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}; expected 0 … 1, 1 excluded (centroids would never move)")
        if not 0 <= commitment < math.inf:
            raise ValueError(f"commitment is {commitment}; expected 0 or more")
        self.decay, self.commitment, self.causal = decay, commitment, causal
        own = torch.Generator().manual_seed(seed)
        start = F.layer_norm(torch.randn(heads, clusters, head_dim, generator=own), (head_dim,))
        for name, t in (("centroids", start), ("sums", start.clone()), ("counts", torch.ones(heads, clusters))):
            self.register_buffer(name, t)
        self._found: Tensor | None = None  # [H, C, D + 1] of this step; no buffer, since processes hold different ones
        self._occupied: Tensor | None = None  # [H, C] tokens of the last step
        self._loss: Tensor | None = None

    @classmethod
    def build(cls, spec: HeadSpec) -> Routing:
        p = spec.p
        return cls(
            spec.heads, spec.head_dim, p.window, clusters=p.clusters, commitment=p.commitment,
            causal=spec.causal,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = super().supports(position=position)
        if self.causal:
            return reasons
        if persistent:
            reasons.append("Routing in an encoder takes the mean over clusters, so it goes with no persistent vectors")
        return [*reasons, *own_output(self, cache=cache, mixed=mixed)]

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        if self.causal:
            self.keys_are_queries = True
            key.requires_grad_(False)  # keys are the queries: what is not used must not wait for a gradient

    def queries(self, q: Tensor) -> Tensor:
        return F.layer_norm(q, q.shape[-1:])

    def similarity(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] after LayerNorm → [B, H, T, C]"""
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            return x.to(wide) @ self.centroids.to(wide).transpose(1, 2)

    def hashed(self, x: Tensor) -> Tensor:
        near, ids = self.similarity(x).max(-1)
        return torch.where(near.isnan(), self.buckets, ids)[:, :, None]

    def seen(self, batch: int) -> Seen:
        scale = self.centroids.shape[2] ** -0.5
        dropout = self.dropout if self.training else 0.0
        return Seen(self.window, itself=True, scale=scale, dropout=dropout, backend=self.backend)

    def place(self, q: Tensor, v: Tensor, view: View) -> Placed:
        placed = super().place(q, v, view)
        self._learn([(placed.q.view(q.shape), placed.ids.view(q.shape[:3]))])
        return placed

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        return super().new_memory(shape) if self.causal else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if self.causal:
            return super().forward(q, k, v, rule, view)
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        x, y = (F.layer_norm(t, t.shape[-1:]) for t in (q, k))
        nearest = [self.similarity(t.detach()) for t in (x, y)]
        ids = [near.max(-1).indices.masked_fill(near.isnan().any(-1), self.buckets) for near in nearest]
        if view.padding is not None:
            hidden = view.padding[:, None]
            ids = [each.masked_fill(hidden, self.buckets) for each in ids]
            nearest = [near.masked_fill(hidden[..., None], -math.inf) for near in nearest]
        self._learn(list(zip((x, y), ids, strict=True)))
        return attend_top(x, y, v, nearest[0], nearest[1], self.window, self.seen(len(q)))

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        """Once for each `forward`: a graph must not stay here, since a module that holds one cannot be copied."""
        loss, self._loss = self._loss, None
        return loss

    def _learn(self, found: list[tuple[Tensor, Tensor]]) -> None:
        """From x [B, H, T, D] and clusters [B, H, T]: the commitment loss, and sums for `after_step`. Not in
        evaluation; a backward pass that computes a layer again does not count its tokens again.

        Σ_i ‖x_i − μ_c(i)‖² = Σ_i |x_i|² − Σ_c (2·μ_c·Σ_{i ∈ c} x_i − n_c·|μ_c|²), whose sums the centroids need too."""
        self._loss = None
        if not (self.training and (torch.is_grad_enabled() or to_be_recomputed())):
            return
        for x, ids in found:
            size = self.heads, self.buckets + 1, x.shape[-1]  # the last is of tokens in no cluster
            rows = ids.clamp(max=self.buckets) + torch.arange(self.heads, device=x.device)[:, None] * size[1]
            rows, dtype = rows.flatten(), self.sums.dtype
            sums = x.new_zeros(size, dtype=dtype).flatten(0, 1).index_add(0, rows, x.flatten(0, 2).to(dtype))
            sums = sums.view(size)[:, :-1]
            counts = torch.bincount(rows, minlength=size[0] * size[1]).view(size[:2])[:, :-1].to(dtype)
            near = (sums * self.centroids).sum() * 2 - (counts * self.centroids.square().sum(-1)).sum()
            far = torch.where(ids < self.buckets, torch.linalg.vecdot(x, x).to(dtype), 0).sum()
            loss = self.commitment * (far - near) / counts.sum().clamp(min=1) / len(found)
            self._loss = loss if self._loss is None else self._loss + loss
            if not recomputing():
                more = torch.cat([sums.detach(), counts[..., None]], -1)
                self._found = more if self._found is None else self._found + more

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the centroids by the tokens of this step, of all processes."""
        found, self._found = self._found, None
        if found is None:
            return
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(found)
        sums, counts = found[..., :-1], found[..., -1]
        self.sums.lerp_(sums, 1 - self.decay)
        self.counts.lerp_(counts, 1 - self.decay)
        total = self.counts.sum(1, keepdim=True)
        smooth = (self.counts + SMOOTH) / (total + self.buckets * SMOOTH) * total
        self.centroids.copy_(self.sums / smooth[..., None])
        self._occupied = counts

    def occupancy(self) -> Occupancy | None:
        """Of the last step; None before the first."""
        if self._occupied is None:
            return None
        share = self._occupied / self._occupied.sum(1, keepdim=True).clamp(min=1)
        entropy = -(share * share.clamp(min=1e-30).log2()).sum(1).mean()
        return Occupancy(*torch.stack([share.min(), share.max(), entropy]).tolist())

    def advice(self) -> str | None:
        """Clusters that have collapsed."""
        found, even = self.occupancy(), math.log2(self.buckets)
        if found is None or found.entropy >= COLLAPSED * even:
            return None
        return (
            f"clusters have collapsed: the fullest holds {found.most:.0%} of a head's tokens and the emptiest "
            f"{found.least:.0%} (entropy {found.entropy:.1f} of {even:.1f} bits); use fewer clusters than "
            f"{self.buckets}, or lower optim.lr or decay ({self.decay:g})"
        )

    def extra_repr(self) -> str:
        more = "" if self.causal else ", causal=False"
        return f"heads={self.heads}, window={self.window}, clusters={self.buckets}{more}"
