"""Gated linear attention: a state that forgets by a gate for each channel of the keys.

    S_t = diag(e^(gates_t)) S_{t−1} + k_t v_tᵀ        out_t = S_tᵀ q_t

Yang et al., 2024 (https://arxiv.org/abs/2312.06635). Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D
size of keys, Dv of values.
"""

from __future__ import annotations

from torch import Tensor

from spanformer.ops.linear.gated_portable import run_portable
from spanformer.ops.linear.matrix_backends import choose
from spanformer.ops.linear.matrix_call import make_call


def attend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    state: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """out [B, H, T, Dv], and the state [B, Hkv, D, Dv] after the last token, float32 (float64 beside float64 inputs).

    q [B, H, T, D]; k [B, Hkv, T, D]; v [B, Hkv, T, Dv]; H a multiple of Hkv. gates [B, Hkv, T, D]: the logarithms,
    finite and at most 0, of what token t multiplies the state's rows by before it joins. state, documents and padding
    as in `attend_delta`. All results are differentiable.
    """
    call = make_call(q, k, v, None, gates, state, documents=documents, padding=padding)
    return choose(call, backend, run_portable)
