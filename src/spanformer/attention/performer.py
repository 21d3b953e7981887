"""Rethinking Attention with Performers (Choromanski et al., 2021). https://arxiv.org/abs/2009.14794

    exp(q·k/√D) = E[φ(q)·φ(k)]      φ(x) = m^−½ exp(ω x' − |x'|²/2),   x' = x D^−¼      "FAVOR+", positive features
                                    φ(x) = m^−½ (relu(ω x') + 10⁻³)                     relu: another kernel

ω [m, D]: blocks of D orthogonal rows, each as long as a Gaussian vector of its own; all heads of a layer share it.
Exponents are taken below their running maximum M_t (`decay` = M_{t−1} − M_t), never below one of later tokens: the
usual maximum over the whole text changes earlier outputs. Nothing is added to the features, which would depend on M.
Where queries and keys are so large that no feature of a query meets one of a key, the sum of weights is below LEAST,
and the output is 0. Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size, m features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spanformer.attention.base import wide_linear
from spanformer.attention.recurrent import KeyFeatures, RecurrentAttention, Tensors
from spanformer.attention.running_max import running_max
from spanformer.kinds import HeadSpec
from spanformer.memory import MemoryShape
from spanformer.ops import Divide

FLOOR = 1e-3
"""of ReLU features, so that no sum is 0"""
LEAST = 1e-30
"""of a sum of weights: gradients are divided by it, and overflow where it is smaller"""


class Performer(RecurrentAttention):
    """`redraw`: new features every this many training steps, 0 for never. A state that is carried over a redraw mixes
    two sets of features, so redraw rarely, or begin texts anew. In float32 or wider for any input."""

    omega: Tensor
    clock: Tensor

    def __init__(
        self, heads: int, head_dim: int, features: int = 256, kv_heads: int = 0, *, relu: bool = False, redraw: int = 0,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(heads, features, kv_heads, causal=causal)
        if features < head_dim:
            raise ValueError(
                f"features is {features}; expected at least the head size, {head_dim}: fewer cannot tell keys apart"
            )
        if redraw < 0:
            raise ValueError(f"redraw is {redraw}; expected a number of training steps, or 0 for never")
        self.relu, self.redraw, self.stores_features = relu, redraw, causal
        seed = torch.randint(1 << 62, (1,), device="cpu")
        self.register_buffer("omega", orthogonal_features(features, head_dim, _generator(seed, 0)).to(torch.empty(0)))
        """[m, D]"""
        self.register_buffer("clock", torch.cat([seed, torch.zeros_like(seed)]).to(torch.empty(0).device))
        """[2] the seed, and training steps so far: a checkpoint continues the same sequence of draws"""

    @classmethod
    def build(cls, spec: HeadSpec) -> Performer:
        p = spec.p
        return cls(
            spec.heads, spec.head_dim, p.features, spec.kv_heads, relu=bool(p.relu), redraw=p.redraw, causal=spec.causal
        )  # fmt: skip

    def exponents(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] → log φ(x) [B, H, T, m] without m^−½; for ReLU features ω x'."""
        x = x.to(torch.promote_types(x.dtype, torch.float32)) * x.shape[3] ** -0.25
        found = wide_linear(x, self.omega)
        return found if self.relu else found - x.square().sum(3, keepdim=True) / 2

    def query_features(self, q: Tensor) -> tuple[Tensor, Tensor]:
        found = self.exponents(q)
        if self.relu:
            return found.relu() + FLOOR, found.new_full(found.shape[:3], -math.log(self.features))
        peak = found.detach().amax(3)  # it cancels in the output
        return (found - peak[..., None]).exp(), peak - math.log(self.features)

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        found = self.exponents(inputs["k"])
        if self.relu:
            return KeyFeatures(found.relu() + FLOOR)
        if padding is not None:
            found = found.masked_fill(padding[:, None, :, None], -torch.inf)
        highest = found.detach().amax(3)
        if not self.causal:
            peak = highest.amax(2, keepdim=True).expand_as(highest)
            return KeyFeatures((found - _finite(peak)[..., None]).exp(), peak=_finite(peak))
        before, peak = running_max(highest, state["peak"], documents)
        decay = torch.where(before.isneginf(), 0, before - peak)  # an empty state stays empty
        return KeyFeatures((found - _finite(peak)[..., None]).exp(), decay, peak)

    def divide(self) -> Divide:
        return Divide("sum", LEAST)

    def empty_state(self, shape: MemoryShape) -> Tensors:
        found = super().empty_state(shape)
        return found if self.relu else found | {"peak": found["z"].new_full(found["z"].shape[:2], -torch.inf)}

    def after_step(self) -> None:
        if not self.redraw:
            return
        self.clock[1] += 1
        seed, steps = self.clock.cpu()
        if int(steps) % self.redraw == 0:
            features, head_dim = self.omega.shape
            self.omega.copy_(orthogonal_features(features, head_dim, _generator(seed, int(steps))))

    def extra_repr(self) -> str:
        return super().extra_repr() + (", relu=True" if self.relu else "") + f", redraw={self.redraw}"


def orthogonal_features(features: int, head_dim: int, generator: torch.Generator | None = None) -> Tensor:
    """[m, D] rows that are orthogonal within each block of D, each with the length of a Gaussian vector of its own."""

    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64, device="cpu")

    blocks = []
    for _ in range(0, features, head_dim):
        q, r = torch.linalg.qr(gaussian(head_dim))
        blocks.append((q * r.diagonal().sign()).T)  # with the signs: no direction is preferred
    return torch.cat(blocks)[:features] * gaussian(features).norm(dim=1, keepdim=True)


def _generator(seed: Tensor, steps: int) -> torch.Generator:
    """Of its own: drawing features leaves the global generator alone, and every process of a run draws the same."""
    return torch.Generator("cpu").manual_seed((int(seed) + steps) % (1 << 63))


def _finite(peak: Tensor) -> Tensor:
    """Before the first token that is no padding there is no maximum."""
    return peak.masked_fill(peak.isneginf(), 0)
