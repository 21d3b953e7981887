"""Retentive Network: A Successor to Transformer for Large Language Models (Sun et al., 2023).
https://arxiv.org/abs/2307.08621

    out_i = rms_norm(Σ_{j ≤ i} γ^(i − j) (q_i·k_j/√D) v_j)        γ_h = 1 − 2^(−5 − h),  h = 0 … Hkv − 1

Weights may be negative and are not normalised; each head's output is divided by its root mean square instead. A head's
span is 1/(1 − γ) tokens, after which a token counts 1/e as much. The rest of RetNet's block (its gate) is not part of
this. Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.attention.recurrent import BACKENDS, KeyFeatures, RecurrentAttention, Tensors
from spanformer.kinds import HeadSpec
from spanformer.ops import Divide, sum_linear

EPS = 1e-6
SHORTEST, LONGEST = 1.0, 20.0
"""log₂ of a learned span: 2 tokens to a million"""


class Retention(RecurrentAttention):
    """`learned`: the decay is a parameter, log₂ of the span 1/(1 − γ); it starts at the fixed values."""

    log_span: Tensor

    def __init__(self, heads: int, head_dim: int, kv_heads: int = 0, *, learned: bool = False) -> None:
        super().__init__(heads, head_dim, kv_heads)
        self.learned = learned
        log_span = (5.0 + torch.arange(self.kv_heads)).clamp(max=LONGEST)  # γ of more heads is 1 in float32
        if learned:
            self.log_span = nn.Parameter(log_span)
        else:
            self.register_buffer("log_span", log_span)

    @classmethod
    def build(cls, spec: HeadSpec) -> Retention:
        return cls(spec.heads, spec.head_dim, spec.kv_heads, learned=bool(spec.p.learned))

    def query_features(self, q: Tensor) -> tuple[Tensor, None]:
        return q, None  # `divide` has the √D

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        wide = torch.promote_types(self.log_span.dtype, torch.float32)
        decay = torch.log1p(-torch.exp2(-self.log_span.to(wide)))  # log γ
        return KeyFeatures(inputs["k"], decay[None, :, None])

    def divide(self) -> Divide:
        return Divide("rms", EPS * self.features)  # the norm of √D out is the one of out

    def pair_weights(self, q: Tensor, inputs: Tensors, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        """With signs, divided by the sum of their sizes."""
        ones = torch.eye(q.shape[2], dtype=q.dtype, device=q.device).expand(*inputs["v"].shape[:3], -1)
        keys = self.key_features(inputs, {}, padding, documents)
        (found, _), _ = sum_linear(
            q, keys.b, ones, keys.decay, padding=padding, documents=documents, backend=BACKENDS[self.backend]
        )
        return found / found.abs().sum(3, keepdim=True).clamp(min=EPS)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = super().supports(position=position, cache=cache, mixed=mixed, persistent=persistent)
        if persistent:
            reasons.append(
                "model.persistent is set, and Retention has no sum of weights for learned vectors to join; set it to 0"
            )
        return reasons

    def spans(self) -> list[float | None]:
        shared = self.heads // self.kv_heads
        return [2.0**z for z in self.log_span.tolist() for _ in range(shared)]

    @torch.no_grad()
    def after_step(self) -> None:
        if self.learned:
            self.log_span.clamp_(SHORTEST, LONGEST)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", learned={self.learned}"
