"""Causal linear attention with a log-decay per head and token, in time linear in the text.

    P_ij = (a_i·b_j) e^(G_i − G_j)        out_i = Σ_{j ≤ i} P_ij v_j / Σ_{j ≤ i} P_ij        lse_i = log Σ_{j ≤ i} P_ij
    G_i  = Σ_{l ≤ i} decay_l

a and b are features of queries and keys. elu + 1 (Katharopoulos et al., 2020), random features (Performer, RFA), gates
and retention differ only in a, b and decay. No exponent above 0 is ever taken: exponents are differences G_i − G_j ≤ 0.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, m features, Dv size of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.linear.call import BY_SUM, Divide, LinearCall, LinearState, make_call
from spanformer.ops.linear.portable import run_portable, run_whole
from spanformer.ops.linear.reference import run_reference

BACKENDS = ("auto", "native", "portable", "reference")


def attend_linear(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: LinearState | None = None,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    elu: bool = False,
    divide: Divide = BY_SUM,
    backend: str = "auto",
) -> tuple[Attended, LinearState]:
    """Linear attention: out [B, H, T, Dv] and lse [B, H, T], and the state after the last token.

    a [B, H, T, m]; b [B, Hkv, T, m]; v [B, Hkv, T, Dv]; H a multiple of Hkv. Sums of a·b must not be negative.
    decay [1 or B, Hkv, 1 or T]: the logarithm (at most 0) of what token t multiplies the state by before it joins.
    state: of earlier tokens. documents [B, T] ids: a token whose id differs from the one before begins with an empty
    state; the state that is passed in belongs to the first token's document. padding [B, T] or [B, Hkv, T] bool: True
    tokens neither join nor decay.
    elu: a and b are queries and keys, and their features elu + 1; the kernel then stores no features.
    causal=False: every token sees every other, without decay or state.
    divide: by what a row is divided; the lse of rows divided by their root mean square is 0.
    A row whose sum is 0 gives zeros and −inf. All results are differentiable.
    """
    call = make_call(
        a, b, v, decay, state, documents=documents, padding=padding, near=None, ramp=0.0, divide=divide, elu=elu
    )  # fmt: skip
    out, lse, after = _run(call, causal, backend)
    assert after is not None
    return Attended(out, lse), after


def attend_far(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    near: Tensor,
    ramp: float,
    state: LinearState | None = None,
    *,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    elu: bool = False,
    backend: str = "auto",
) -> Attended:
    """Linear attention beyond a border, so that another mechanism can serve the nearer keys.

    The weight of a pair at distance d is multiplied by clip((d − near) / ramp, 0, 1); keys beyond near + ramp come as a
    state that lags behind the queries. a [B, H, Tq, m]: of the last Tq of the T tokens of b and v. near [H] or
    [1 or B, H, 1 or Tq]; it has a gradient. state: of tokens before b's first, which all queries see in full.
    The others as in `attend_linear`. Returns out [B, H, Tq, Dv] and lse [B, H, Tq].
    """
    call = make_call(
        a, b, v, None, state, documents=documents, padding=padding, near=near, ramp=ramp, divide=BY_SUM, elu=elu
    )  # fmt: skip
    out, lse, _ = _run(call, True, backend)
    return Attended(out, lse)


def sum_linear(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: LinearState | None = None,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[tuple[Tensor, Tensor], LinearState]:
    """As `attend_linear`, before the division: (numerator [B, H, T, Dv], denominator [B, H, T]) and the state. For
    features that may be negative, and for mechanisms that norm their output instead."""
    call = make_call(
        a, b, v, decay, state, documents=documents, padding=padding, near=None, ramp=0.0, divide=None
    )  # fmt: skip
    numerator, denominator, after = _run(call, causal, backend)
    assert after is not None
    return (numerator, denominator), after


def _run(call: LinearCall, causal: bool, backend: str) -> tuple[Tensor, Tensor, LinearState | None]:
    """The state is None with `near`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if not causal:
        return run_whole(call.with_features())
    if backend == "reference":
        return run_reference(call.with_features())
    reasons = ["backend is 'portable'"] if backend == "portable" else _native_refuses(call)
    if not reasons:
        from spanformer.ops.linear.native import run_native

        return run_native(call)
    if backend == "native":
        raise ValueError(f"backend 'native' cannot serve this call: {'; '.join(reasons)}")
    return run_portable(call.with_features())


def _native_refuses(call: LinearCall) -> list[str]:
    if call.v.device.type != "cpu":
        return [f"v is on {call.v.device}; the native kernel runs on the CPU"]
    if call.v.dtype not in (torch.float32, torch.bfloat16):
        return [f"v has dtype {call.v.dtype}; the native kernel takes float32 and bfloat16"]
    if torch.compiler.is_compiling():
        return ["torch.compile is tracing; it compiles the portable path instead"]
    from spanformer.ops.linear.native import unusable

    return unusable()
