"""Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (T5; Raffel et al., 2019), §2.1.
https://arxiv.org/abs/1910.10683

    s_ij += b_h[bucket(d)]        d = i − j
    bucket(d) = d                                                              for d < N / 2
              = N/2 + ⌊N/2 · log(d / (N/2)) / log(M / (N/2))⌋, at most N − 1   beyond

for N buckets up to distance M. Without causality, half of the buckets are for future keys. T5 does not divide
scores by sqrt(D); set the attention's `scale` for that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class T5(Position):
    """A learned number for each head and bucket, shared by all layers that have the same object, as in T5. Starts
    at 0: no distance is preferred."""

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, *, causal: bool = True) -> None:
        super().__init__()
        exact = buckets // 2 if causal else buckets // 4
        if heads < 1 or exact < 1 or buckets % 2 or max_distance <= exact:
            raise ValueError(
                f"heads is {heads}, buckets {buckets} and max_distance {max_distance}; expected at least 1 head, "
                f"{2 if causal else 4} or more buckets, an even number, and a distance beyond the first {exact}"
            )
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.bias = nn.Parameter(torch.zeros(heads, buckets))
        """[H, N]"""

    @classmethod
    def build(cls, spec: PositionSpec) -> T5:
        return cls(spec.heads, causal=spec.causal)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance i − j; a causal encoding has no bucket for distances below 0."""
        count, first = self.buckets, 0
        if not self.causal:
            count //= 2
            first = (distance < 0) * count
        far, exact = distance.abs(), count // 2
        # In float32, as in T5's code: in float64 a distance at the edge of a bucket would fall into the other one.
        share = torch.log(far.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        beyond = exact + (share * (count - exact)).long()
        return first + torch.where(far < exact, far, beyond.clamp(max=count - 1))

    def rule(self, view: Places, length: int) -> Rule:
        future = 0 if self.causal else max(length - 1, 1)
        distance = torch.arange(-future, max(length, 1 + future), device=self.bias.device)
        return Rule(len(self.bias), causal=False, max_future=future, distance_bias=self.bias[:, self.bucket(distance)])

    def extra_repr(self) -> str:
        both = "" if self.causal else ", causal=False"
        return f"heads={len(self.bias)}, buckets={self.buckets}, max_distance={self.max_distance}{both}"
