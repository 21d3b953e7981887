"""Gradients of queries, of spans and of sink logits: one program for a tile of queries, with the loops of forward.py.

The slow, obvious version, with P_ij = m_ij · exp(s_ij − lse_i):

    δ_i = Σ_c dout_ic · out_ic − dlse_i                 dP_ij = dout_i · v_j
    dS_ij = P_ij · (dP_ij − δ_i)                        dq_i = scale · Σ_j dS_ij · k_j
    dz_i = Σ_j exp(s_ij − lse_i) · (dP_ij − δ_i) / ramp over the pairs on the ramp, 0 < m < 1
    dsink_i = −exp(sink − lse_i) · δ_i

Every row's dz_i and dsink_i are stored and added up afterwards: no atomics, so the result is the same in every run.
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import (
    LOG2E,
    edge_start,
    far_and_near,
    load_lse,
    load_rows,
    store_rows,
    weight,
)
from spanformer.ops.backends.triton.scores import edge_ramp, edge_scores, keys_seen
from spanformer.ops.backends.triton.tokens import (
    INTEGERS,
    documents_of,
    locate,
    longest,
    positions_of,
    reach_of,
    shortest,
    spans_of,
)


@triton.jit
def row_gradient(OUT, DLSE, do, b, h, block, rows, TQ, H, sob, soh, sot, DV: tl.constexpr, BDV: tl.constexpr,
                 BM: tl.constexpr):  # fmt: skip
    """δ [BM]. OUT None: −dlse is all of it."""
    row = (b * H + h).to(tl.int64) * TQ + rows
    delta = tl.zeros([BM], tl.float32)
    if OUT is not None:
        out = load_rows(OUT + b.to(tl.int64) * sob + h.to(tl.int64) * soh, block * BM, sot, TQ, DV, BDV, BM, True)
        delta += tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + row, mask=rows < TQ, other=0.0)
    return delta


@triton.jit(do_not_specialize=INTEGERS)
def backward_q(
    Q, K, V, OUT, DOUT, LSE, DLSE, DQ, DELTA, DSPAN, DSINK, SPAN, REACH, BIAS, KEY_BIAS, SINK, Q_POS, K_POS, Q_DOC,
    K_DOC,
    B, H, G, TQ, TK, offset, last_entry, max_future, stride_kb, shared_kb, stride_qp, stride_kp, stride_qd, stride_kd,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sgb, sgh, sgt, sdb, sdh, sdt, scale, ramp,
    CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PLAIN: tl.constexpr = BIAS is None and KEY_BIAS is None and K_POS is None and K_DOC is None
    block, b, h = locate(tl.program_id(0), SPAN, REACH, ramp, B, H, 1, tl.cdiv(TQ, BM), HEADS, DYNAMIC)
    block = tl.cdiv(TQ, BM) - 1 - block  # in causal attention the last ones see most
    rows = block * BM + tl.arange(0, BM)
    b64, h64, scale2 = b.to(tl.int64), h.to(tl.int64), scale * LOG2E
    q = load_rows(Q + b64 * sqb + h64 * sqh, block * BM, sqt, TQ, D, BD, BM, True)
    do = load_rows(DOUT + b64 * sgb + h64 * sgh, block * BM, sgt, TQ, DV, BDV, BM, True)
    K += b64 * skb + (h // G).to(tl.int64) * skh
    V += b64 * svb + (h // G).to(tl.int64) * svh
    delta = row_gradient(OUT, DLSE, do, b, h, block, rows, TQ, H, sob, soh, sot, DV, BDV, BM)
    first_row = (b * H + h).to(tl.int64) * TQ
    lse = load_lse(LSE + first_row, rows, TQ)
    z = spans_of(SPAN, b, h, H, rows, TQ, DYNAMIC)
    reach = reach_of(REACH, h, Q_POS is not None)
    far, near = far_and_near(shortest(z, rows, TQ, DYNAMIC), longest(z, rows, TQ, DYNAMIC), ramp, reach)
    row = positions_of(Q_POS, stride_qp, b, rows, TQ, offset)
    row_doc = documents_of(Q_DOC, stride_qd, b, rows, TQ)
    lo, full_lo, full_hi, hi = keys_seen(
        block, rows, row, row_doc, K_POS, K_DOC, stride_kp, stride_kd, b, TQ, TK, offset, far, near, PLAIN, CAUSAL,
        BM, BN,
    )  # fmt: skip
    dq, dz = tl.zeros([BM, BD], tl.float32), tl.zeros([BM], tl.float32)
    for n in range((full_lo - lo + hi - full_hi) // BN):
        n0 = edge_start(n, lo, full_lo, full_hi, BN)
        k = load_rows(K, n0, skt, TK, D, BD, BN, True)
        left = edge_ramp(n0, b, row, z, ramp, K_POS, stride_kp, TK, CAUSAL, DYNAMIC, BN)
        t = edge_scores(
            q, k, left, n0, b, h, row, row_doc, reach, BIAS, KEY_BIAS, K_POS, K_DOC, TK, last_entry, max_future,
            stride_kb, shared_kb, stride_kp, stride_kd, scale2, CAUSAL, BN, PRECISION,
        )  # fmt: skip
        v = load_rows(V, n0, svt, TK, DV, BDV, BN, True)
        ds = tl.exp2(t - lse[:, None]) * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if SPAN is not None:
            dz += tl.sum(tl.where(left < ramp, ds, 0.0), 1)
            ds = ds * weight(left, ramp)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if PLAIN:
        for n in range((full_hi - full_lo) // BN):
            n0 = full_lo + n * BN
            k = load_rows(K, n0, skt, TK, D, BD, BN, False)
            v = load_rows(V, n0, svt, TK, DV, BDV, BN, False)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 - lse[:, None])
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ + b64 * sdb + h64 * sdh, dq * scale, block * BM, sdt, TQ, D, BD, BM)
    tl.store(DELTA + first_row + rows, delta, mask=rows < TQ)
    if SPAN is not None:
        tl.store(DSPAN + first_row + rows, dz / ramp, mask=rows < TQ)
    if SINK is not None:
        share = tl.exp2(tl.load(SINK + h).to(tl.float32) * LOG2E - lse)
        tl.store(DSINK + first_row + rows, -share * delta, mask=rows < TQ)
