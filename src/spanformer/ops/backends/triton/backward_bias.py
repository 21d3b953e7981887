"""The gradient of a learned distance bias: one program for a head and an entry of its table, which is a diagonal of the
pairs. No two programs write to one number, so nothing needs atomics; the products are plain sums over a head's size.

The slow, obvious version, with dS of backward_q.py:

    dbias[d] = Σ_b Σ_i dS_ij over the pairs with i − j − shift = d          (and −d, where tables are read at |d|)
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import (
    LOG2E,
    far_and_near,
    load_lse,
    load_rows,
    pair_scores,
    ramp_left,
    weight,
)
from spanformer.ops.backends.triton.tokens import INTEGERS, documents_of, key_bias_of, reach_of, spans_of


@triton.jit(do_not_specialize=INTEGERS)
def backward_bias(
    Q, K, V, DOUT, LSE, DELTA, DBIAS, SPAN, REACH, BIAS, KEY_BIAS, Q_DOC, K_DOC,
    B, H, G, TQ, TK, offset, last_entry, max_future, stride_kb, shared_kb, stride_qp, stride_kp, stride_qd, stride_kd,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sgb, sgh, sgt, scale, ramp,
    CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    h, entry = tl.program_id(0) % H, tl.program_id(0) // H
    z = spans_of(None if DYNAMIC else SPAN, entry, h, H, entry, TQ, False)
    far, _ = far_and_near(z, z, ramp, reach_of(REACH, h, False))
    total = tl.zeros([BM], tl.float32)
    for side in range(2):  # tables read at |d| hold two diagonals in an entry
        d = tl.where(max_future > 0, entry - max_future, tl.where(side == 1, -entry, entry))
        reached = (tl.abs(d) < far) & ((side == 0) | ((max_future == 0) & (entry > 0)))
        if CAUSAL:
            reached = reached & (d >= 0)
        lo, hi = tl.maximum(d - offset, 0), tl.minimum(TQ, TK + d - offset)
        hi = tl.where(reached, hi, lo)
        for b in range(B):
            for n in range(tl.cdiv(tl.maximum(hi - lo, 0), BM)):
                m0 = lo + n * BM
                total += diagonal(
                    Q, K, V, DOUT, LSE, DELTA, SPAN, REACH, BIAS, KEY_BIAS, Q_DOC, K_DOC, m0 + offset - d, m0, hi, b, h,
                    H, G, TQ, TK, offset, last_entry, max_future, stride_kb, shared_kb, stride_qd, stride_kd,
                    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sgb, sgh, sgt, scale, ramp,
                    CAUSAL, DYNAMIC, D, DV, BD, BDV, BM,
                )  # fmt: skip
    tl.store(DBIAS + h * (last_entry + 1) + entry, tl.sum(total, 0))


@triton.jit
def diagonal(
    Q, K, V, DOUT, LSE, DELTA, SPAN, REACH, BIAS, KEY_BIAS, Q_DOC, K_DOC, n0, m0, hi, b, h, H, G, TQ, TK, offset,
    last_entry, max_future, stride_kb, shared_kb, stride_qd, stride_kd, sqb, sqh, sqt, skb, skh, skt, svb, svh, svt,
    sgb, sgh, sgt, scale, ramp, CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dS [BM] of queries m0 … and keys n0 …, one key for each query."""
    rows, cols = m0 + tl.arange(0, BM), n0 + tl.arange(0, BM)
    b64, h64, g64 = (b + 0 * h).to(tl.int64), h.to(tl.int64), (h // G).to(tl.int64)
    q = load_rows(Q + b64 * sqb + h64 * sqh, m0, sqt, hi, D, BD, BM, True)
    k = load_rows(K + b64 * skb + g64 * skh, n0, skt, TK, D, BD, BM, True)
    v = load_rows(V + b64 * svb + g64 * svh, n0, svt, TK, DV, BDV, BM, True)
    do = load_rows(DOUT + b64 * sgb + h64 * sgh, m0, sgt, hi, DV, BDV, BM, True)
    z = spans_of(SPAN, b64, h, H, rows, TQ, DYNAMIC)
    left = ramp_left(rows + offset, cols, z, ramp, CAUSAL)
    t = pair_scores(
        tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), left, rows + offset, cols, (rows < hi) & (cols < TK),
        reach_of(REACH, h, False), BIAS + h * (last_entry + 1), last_entry, max_future,
        key_bias_of(KEY_BIAS, stride_kb, shared_kb, b64, h, cols, TK), documents_of(Q_DOC, stride_qd, b64, rows, TQ),
        documents_of(K_DOC, stride_kd, b64, cols, TK), scale * LOG2E, CAUSAL,
    )  # fmt: skip
    row = (b64 * H + h) * TQ
    p = tl.exp2(t - load_lse(LSE + row, rows, TQ))
    if SPAN is not None:
        p = p * weight(left, ramp)
    delta = tl.load(DELTA + row + rows, mask=rows < TQ, other=0.0)
    return p * (tl.sum(do.to(tl.float32) * v.to(tl.float32), 1) - delta)
