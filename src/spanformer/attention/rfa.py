"""Random Feature Attention (Peng et al., 2021). https://arxiv.org/abs/2103.02143

    exp(q·k) ∝ E[φ(q)·φ(k)]    φ(x) = N^−½ [sin W x̂, cos W x̂]    x̂ = x / (|x| + 10⁻³)    W = σ∘W̃,  W̃ ~ N(0, 1) [N, D]
    S_t = g_t S_{t−1} + (1 − g_t) φ(k_t) v_tᵀ,  z alike           g_t = sigmoid(w·x_t + b)                  (gated)
    out_t = φ(q_t) S_t / max(φ(q_t)·z_t, 10⁻³)

Queries and keys are unit vectors, so that exp(−|q − k|²/2), which sines and cosines estimate, is exp(q·k) but for a
factor. Estimates of weights may be negative. The released code clamps their sum at 1 when decoding and |sum| at 10⁻³
when training; here it is the same number in both. σ [Hkv, D] is learned and starts at 1; W̃ never changes.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size, N frequencies, m = 2·N features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.base import View, key_states, wide_linear
from spanformer.attention.recurrent import KeyFeatures, RecurrentAttention, Tensors
from spanformer.kinds import HeadSpec
from spanformer.memory import MemoryShape
from spanformer.ops import Divide

LEAST = 1e-3
"""of a sum of weights; also added to the length of a vector"""


class RFA(RecurrentAttention):
    frequency: Tensor

    def __init__(
        self, heads: int, head_dim: int, frequencies: int = 64, kv_heads: int = 0, *, causal: bool = True
    ) -> None:  # fmt: skip
        super().__init__(heads, 2 * frequencies, kv_heads, causal=causal)
        self.stores_features = causal
        if self.features < head_dim:
            raise ValueError(
                f"frequencies is {frequencies}, which gives {self.features} features; expected at least the head size, "
                f"{head_dim}: fewer cannot tell keys apart"
            )
        self.register_buffer("frequency", torch.randn(frequencies, head_dim))
        """[N, D]: W̃"""
        self.sigma = nn.Parameter(torch.ones(self.kv_heads, head_dim))
        """[Hkv, D]: σ"""

    @classmethod
    def build(cls, spec: HeadSpec) -> RFA:
        return cls(spec.heads, spec.head_dim, spec.p.frequencies, spec.kv_heads, causal=spec.causal)

    def _features(self, x: Tensor) -> Tensor:
        """x [B, H or Hkv, T, D] → [B, H or Hkv, T, m], in float32 or wider"""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x / (x.norm(dim=3, keepdim=True) + LEAST)
        scale = self.sigma.to(x.dtype).repeat_interleave(x.shape[1] // self.kv_heads, 0)
        angle = wide_linear(x * scale[:, None], self.frequency)
        by = len(self.frequency) ** -0.5
        if not torch.is_grad_enabled():
            return torch.cat([angle.sin(), angle.cos()], 3).mul_(by)
        return _SinCos.apply(angle, by)  # pyright: ignore[reportReturnType]

    def query_features(self, q: Tensor) -> tuple[Tensor, None]:
        return self._features(q), None

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        return KeyFeatures(self._features(inputs["k"]))

    def divide(self) -> Divide:
        return Divide("clamped", LEAST)


class _SinCos(torch.autograd.Function):
    """by · [sin x, cos x]; the gradient needs the result alone."""

    @staticmethod
    def forward(x, by):
        n = x.shape[-1]
        found = x.new_empty((*x.shape[:-1], 2 * n))
        torch.sin(x, out=found[..., :n])
        torch.cos(x, out=found[..., n:])
        return found.mul_(by)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        sin, cos = ctx.saved_tensors[0].chunk(2, -1)
        of_sin, of_cos = grad.chunk(2, -1)
        return of_sin * cos - of_cos * sin, None


class GatedRFA(RFA):
    """`dim` of hidden states, which the gates read: one gate per KV head and token. It looks back only."""

    def __init__(self, dim: int, heads: int, head_dim: int, frequencies: int = 64, kv_heads: int = 0) -> None:
        super().__init__(heads, head_dim, frequencies, kv_heads)
        self.dim = dim
        self.weight = nn.Parameter(torch.randn(self.kv_heads, dim) / dim**0.5)
        """[Hkv, dim]: w"""
        self.bias = nn.Parameter(torch.zeros(self.kv_heads))
        """[Hkv]: b"""

    @classmethod
    def build(cls, spec: HeadSpec) -> GatedRFA:
        return cls(spec.dim, spec.heads, spec.head_dim, spec.p.frequencies, spec.kv_heads)

    def token_inputs(self, k: Tensor, v: Tensor, view: View) -> Tensors:
        gate = wide_linear(key_states(view, self.dim), self.weight, self.bias)
        return {"k": k, "v": v, "gate": gate.transpose(1, 2)}  # [B, Hkv, T], before the sigmoid

    def more_inputs(self, shape: MemoryShape) -> Tensors:
        wide = torch.promote_types(shape.dtype, torch.float32)
        return {"gate": torch.zeros(shape.batch, shape.kv_heads, shape.slack, dtype=wide, device=shape.device)}

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        gate = inputs["gate"]
        b = self._features(inputs["k"]) * (-gate).sigmoid()[..., None]  # 1 − g, exact where g is near 1
        return KeyFeatures(b, F.logsigmoid(gate))
