"""Self-Attention with Relative Position Representations (Shaw, Uszkoreit, Vaswani, 2018).
https://arxiv.org/abs/1803.02155

    s_ij  = q_i·(k_j + a[c]) / sqrt(D)        c = clip(i − j, −C, C)
    out_i = Σ_j softmax(s)_ij · (v_j + b[c])

Shapes: L distances with separate vectors (C + 1 if causal, else 2C + 1), D head size.
"""

from __future__ import annotations

import torch
from torch import nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class Shaw(Position):
    """Two vectors for each distance up to `clip`, shared by the heads of a layer (§3.4): one is added to keys, one to
    values. Farther tokens use the vectors of distance `clip`. They start from N(0, 1/D), the norm of a key."""

    def __init__(self, heads: int, head_dim: int, clip: int = 16, *, causal: bool = True) -> None:
        super().__init__()
        if heads < 1 or head_dim < 1 or clip < 1:
            raise ValueError(f"heads is {heads}, head_dim {head_dim} and clip {clip}; expected at least 1 each")
        self.heads, self.clip, self.causal = heads, clip, causal
        length = clip + 1 if causal else 2 * clip + 1
        self.keys, self.values = (nn.Parameter(torch.randn(length, head_dim) * head_dim**-0.5) for _ in range(2))
        """[L, D] each; entry C is distance 0, or entry 0 if causal"""

    @classmethod
    def build(cls, spec: PositionSpec) -> Shaw:
        return cls(spec.heads, spec.head_dim, spec.clip, causal=spec.causal)

    def rule(self, view: Places, length: int) -> Rule:
        future = 0 if self.causal else max(length - 1, 1)
        distance = torch.arange(-future, max(length, 1 + future), device=self.keys.device)
        first = 0 if self.causal else -self.clip
        vectors = self.keys[distance.clamp(first, self.clip) - first]
        return Rule(
            self.heads, causal=False, max_future=future, distance_vec=vectors[None], distance_value=self.values[None]
        )

    def extra_repr(self) -> str:
        both = "" if self.causal else ", causal=False"
        return f"heads={self.heads}, head_dim={self.keys.shape[1]}, clip={self.clip}{both}"
