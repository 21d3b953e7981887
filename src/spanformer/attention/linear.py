"""Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention (Katharopoulos et al., 2020).
https://arxiv.org/abs/2006.16236

    w_ij = φ(q_i)·φ(k_j)        φ(x) = elu(x) + 1        out_i = Σ_j w_ij v_j / Σ_j w_ij

Features are positive, so that the sum of weights is, and no 1/√D is needed: it would cancel only for large x. A query
whose features are all 0 (all its numbers far below 0) gives zeros.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from spanformer.attention.base import adds_rule, rotates
from spanformer.attention.recurrent import (
    ABSOLUTE,
    BACKENDS,
    KeyFeatures,
    RecurrentAttention,
    Tensors,
    unsupported_position,
)
from spanformer.kinds import HeadSpec
from spanformer.ops import Attended, LinearState, attend_linear


class LinearAttention(RecurrentAttention):
    """m = D."""

    @classmethod
    def build(cls, spec: HeadSpec) -> LinearAttention:
        return cls(spec.heads, spec.head_dim, spec.kv_heads, causal=spec.causal)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if not (rotates(position) or adds_rule(position)):
            return []
        return [f"{unsupported_position(self)}: its weights are no function of q·k; use {ABSOLUTE}"]

    def query_features(self, q: Tensor) -> tuple[Tensor, None]:
        return q, None  # the operation makes the features

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        return KeyFeatures(inputs["k"])

    def combine(
        self, a: Tensor, keys: KeyFeatures, v: Tensor, state: LinearState | None, padding: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Attended, LinearState]:  # fmt: skip
        return attend_linear(
            a, keys.b, v, None, state, causal=self.causal, padding=padding, documents=documents, elu=True,
            backend=BACKENDS[self.backend],
        )  # fmt: skip

    def advance(self, inputs: Tensors, state: Tensors, padding: Tensor) -> Tensors:
        k = inputs["k"].to(state["s"].dtype)
        return super().advance(inputs | {"k": F.elu(k) + 1}, state, padding)
