"""Sparse Sinkhorn Attention (Tay, Bahri, Yang, Metzler, Juan, 2020). https://arxiv.org/abs/2002.11296

    r_ij = a_i·b_j / (√D·τ)        R = exp(r), rows and columns normalised in turn        K'_it ∝ Σ_j R_ij K_jt
    a token of block i sees the keys of block i and, under the same softmax, its matched keys K'_i

K_jt is token t of block j; values are matched by the same R. In an encoder a_i is the mean of the queries of block i,
and b_j that of the keys of block j. (The paper's network gives each block one score per place, which fixes how many
blocks there are; products of means are what sinkhorn-transformer has.) R tends to a permutation: every block is matched
to about one.

In a decoder block i matches only blocks j < i, which are finished, and a_i is the key of its first token: others would
tell it the future. For the same reason the sum of a column ends at row i. This form is weak, and is here for
comparison: a match is chosen before its block is read, and balancing itself prefers the block before, which is alone
in the sum of its column; after many iterations it has all the weight. Matches are among the blocks of a stretch of
max_span tokens; stretches begin at multiples of it.
Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size, N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention.base import Attention, RuleNeeds, View, given_terms, own_output, refused_distances
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, Rule, attend, merge

TERMS = ("heads", "causal", "reach", "ramp", "key_bias")
"""of a rule: padding, which `view` holds too"""
HIDDEN = -1e30
"""the log of a match that is not allowed: −inf would have no gradient"""


class Sinkhorn(Attention):
    """size: tokens of a block; max_span: of a decoder's stretch; noise: of Gumbel, times this, in training."""

    def __init__(
        self, heads: int, size: int = 64, max_span: int = 1024, *, iterations: int = 8, temperature: float = 0.75,
        noise: float = 0.0, causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if heads < 1 or size < 1 or iterations < 1:
            raise ValueError(f"heads is {heads}, size {size} and iterations {iterations}; expected at least 1 each")
        if causal and max_span < size:
            raise ValueError(f"size is {size} and max_span {max_span}; expected a block within max_span")
        if not temperature > 0 or not noise >= 0:
            raise ValueError(f"temperature is {temperature} and noise {noise}; expected above 0, and 0 or more")
        self.heads, self.size, self.stretch, self.causal = heads, size, max_span // size * size, causal
        self.iterations, self.temperature, self.noise = iterations, temperature, noise

    @classmethod
    def build(cls, spec: HeadSpec) -> Sinkhorn:
        p = spec.p
        return cls(
            spec.heads, p.size, p.max_span, iterations=p.iterations, temperature=p.temperature, noise=p.noise,
            causal=spec.causal,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = own_output(self, cache=cache, mixed=mixed)
        return reasons + refused_distances(position, "a matched key is of several blocks")

    def rule_needs(self) -> RuleNeeds:
        return "positions"

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, reach=self.stretch) if self.causal else Rule(self.heads, causal=False)

    def context_length(self) -> list[int]:
        return [self.stretch - 1] * self.heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if others := given_terms(rule, view, TERMS):
            raise ValueError(
                f"{', '.join(others)} was given; a matched key is of several blocks, and only padding can be left out"
            )
        tq, tk, start = q.shape[2], k.shape[2], view.start if self.causal else 0
        dropout = self.dropout if self.training else 0.0
        at = torch.arange(start, start + tk, device=k.device) // self.size - start // self.size
        own = Rule(self.heads, causal=self.causal, reach=self.size, documents=(at[tk - tq :], at))
        own = own + View(padding=view.padding).rule(self.heads, causal=self.causal)
        found = attend(q, k, v, own, backend=self.backend, dropout=dropout)
        if not tk:
            return found
        before = start % self.size
        after = -(before + tk) % self.size
        absent = torch.zeros(1, tk, dtype=torch.bool, device=k.device) if view.padding is None else view.padding
        there = ~F.pad(absent, (before, after), value=True).unflatten(1, (-1, self.size))  # [B or 1, N, size]
        k, v = (F.pad(x, (0, 0, before, after)).unflatten(2, (-1, self.size)) for x in (k, v))
        k, v = (x.masked_fill(~there[:, None, ..., None], 0) for x in (k, v))
        asking = k[:, :, :, 0] if self.causal else self._means(q, k.shape[1], there, after)
        k, v, mass = self._matched(asking, k, v, there, start // self.size)
        q = F.pad(q, (0, 0, 0, after))
        to = torch.arange(k.shape[2], device=k.device) // self.size
        hidden = torch.zeros_like(mass, dtype=torch.float32).masked_fill(mass == 0, -torch.inf)
        matched = Rule(self.heads, causal=False, reach=self.size, documents=(to[-q.shape[2] :], to), key_bias=hidden)
        more = attend(q, k, v, matched, backend=self.backend, dropout=dropout)
        return merge([found, Attended(more.out[:, :, :tq], more.lse[:, :, :tq])])

    def _means(self, q: Tensor, groups: int, there: Tensor, after: int) -> Tensor:
        """q [B, H, T, D] → [B, Hkv, N, D], of the tokens that are no padding and of heads that share keys."""
        q = F.pad(q, (0, 0, 0, after)).unflatten(2, (-1, self.size)).unflatten(1, (groups, -1)).mean(2)
        return _mean(q.masked_fill(~there[:, None, ..., None], 0), there)

    def _matched(
        self, asking: Tensor, k: Tensor, v: Tensor, there: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """asking [B, Hkv, N, D], k and v [B, Hkv, N, size, D] → matched keys and values [B, Hkv, N·size, D], and the
        weight of what each is made of. first: the number of the first block in the text."""
        score = asking @ _mean(k, there).mT * k.shape[-1] ** -0.5
        block = torch.arange(first, first + k.shape[2], device=k.device)
        allowed = there.any(2)[:, None, None]  # [B or 1, 1, 1, N]
        if self.causal:
            stretch = block * self.size // self.stretch
            earlier = (block[:, None] > block) & (stretch[:, None] == stretch)
            allowed = allowed & earlier
        weight = self.match(score, allowed.expand(score.shape))
        # NaN times a weight of 0 is NaN, so a later block would reach earlier ones: such tokens are counted apart.
        broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1))[..., None]
        k, v = k.masked_fill(broken, 0), v.masked_fill(broken, 0)
        real = there[:, None, ..., None].expand_as(broken)
        kinds = torch.cat([k, v, real.to(k.dtype), broken.to(k.dtype)], -1)
        found = (weight.to(k.dtype) @ kinds.flatten(3)).view(kinds.shape).flatten(2, 3)
        k, v, mass, lost = found.split([k.shape[-1], v.shape[-1], 1, 1], -1)
        by = mass.masked_fill(mass == 0, 1).masked_fill(lost != 0, torch.nan)
        return k / by, v / by, mass[..., 0]

    def match(self, score: Tensor, allowed: Tensor) -> Tensor:
        """[B, Hkv, N, N] → R, 0 where a match is not allowed. In a decoder a column's sum ends at the own row."""
        log = score.to(torch.promote_types(score.dtype, torch.float32)) / self.temperature
        if self.noise and self.training:
            log = log - self.noise * torch.empty_like(log).exponential_().log()
        log = log.masked_fill(~allowed, HIDDEN)
        for _ in range(self.iterations):
            log = (log - log.logsumexp(3, keepdim=True)).masked_fill(~allowed, HIDDEN)
            total = log.logcumsumexp(2) if self.causal else log.logsumexp(2, keepdim=True)
            log = (log - total).masked_fill(~allowed, HIDDEN)
        return log.exp()

    def extra_repr(self) -> str:
        return f"heads={self.heads}, size={self.size}, iterations={self.iterations}, causal={self.causal}"


def _mean(x: Tensor, there: Tensor) -> Tensor:
    """x [B, Hkv, N, size, D], 0 where not there [B or 1, N, size] → [B, Hkv, N, D]"""
    return x.sum(3) / there.sum(2).clamp(min=1)[:, None, :, None]
