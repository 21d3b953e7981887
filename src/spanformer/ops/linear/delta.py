"""The gated delta rule: a state that replaces what it holds under a key, instead of adding to it.

    S_t = e^(decay_t) S_{t−1} + β_t k_t (v_t − (e^(decay_t) S_{t−1})ᵀ k_t)ᵀ        out_t = S_tᵀ q_t

Yang, Kautz, Hatamizadeh 2025 (https://arxiv.org/abs/2412.06464); without decay, DeltaNet (Schlag et al., 2021,
https://arxiv.org/abs/2102.11174). Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D size of keys, Dv of
values.
"""

from __future__ import annotations

from torch import Tensor

from spanformer.ops.linear.delta_portable import run_portable
from spanformer.ops.linear.matrix_backends import choose
from spanformer.ops.linear.matrix_call import make_call


def attend_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """out [B, H, T, Dv], and the state [B, Hkv, D, Dv] after the last token, float32 (float64 beside float64 inputs).

    q [B, H, T, D]; k [B, Hkv, T, D]; v [B, Hkv, T, Dv]; H a multiple of Hkv. Keys should have length 1: with β in 0 … 1
    (or 0 … 2) the state then cannot grow. beta [B, Hkv, T]: how much of what the state held under k is replaced.
    decay [B, Hkv, T]: the logarithm, finite and at most 0, of what token t multiplies the state by before it joins.
    state: of earlier tokens. documents [B, T] ids: a token whose id differs from the one before begins with an empty
    state; the state that is passed in belongs to the first token's document. padding [B, T] bool: True tokens neither
    join nor decay. All results are differentiable.
    """
    call = make_call(q, k, v, beta, decay, state, documents=documents, padding=padding)
    return choose(call, backend, run_portable)
