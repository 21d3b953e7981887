"""Gradients of keys, values and key biases: one program for a tile of keys of one key/value head. It visits the query
heads that share it, one after the other, and for each the tiles of queries that see its keys.

The slow, obvious version, with P and dS of backward_q.py:

    dv_j = Σ_i P_ij · dout_i        dk_j = scale · Σ_i dS_ij · q_i        dkey_bias_j = Σ_i dS_ij

Tiles are transposed, [BN, BM], so that P and dS enter their products as they come out of exp2.
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import (
    LOG2E,
    by_column,
    by_row,
    edge_start,
    far_and_near,
    load_lse,
    load_rows,
    pair_scores,
    ramp_left,
    store_rows,
    tiles_seen,
    weight,
)
from spanformer.ops.backends.triton.tokens import (
    INTEGERS,
    documents_of,
    key_bias_of,
    locate,
    longest,
    narrow,
    positions_of,
    reach_of,
    spans_of,
)


@triton.jit(do_not_specialize=INTEGERS)
def backward_kv(
    Q, K, V, DOUT, LSE, DELTA, DKEY, DVALUE, DKEY_BIAS, SPAN, REACH, BIAS, KEY_BIAS, Q_POS, K_POS, Q_DOC, K_DOC,
    B, H, G, TQ, TK, offset, last_entry, max_future, stride_kb, shared_kb, stride_qp, stride_kp, stride_qd, stride_kd,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sgb, sgh, sgt, sdb, sdh, sdt, sfb, sfh, sft, scale, ramp,
    CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PLAIN: tl.constexpr = BIAS is None and KEY_BIAS is None and K_POS is None and K_DOC is None and not DYNAMIC
    # in causal attention the first keys have most queries
    block, b, g = locate(tl.program_id(0), SPAN, REACH, ramp, B, H // G, G, tl.cdiv(TK, BN), HEADS, DYNAMIC)
    n0 = block * BN
    cols, b64, g64, scale2 = n0 + tl.arange(0, BN), b.to(tl.int64), g.to(tl.int64), scale * LOG2E
    k = load_rows(K + b64 * skb + g64 * skh, n0, skt, TK, D, BD, BN, True)
    v = load_rows(V + b64 * svb + g64 * svh, n0, svt, TK, DV, BDV, BN, True)
    col = positions_of(K_POS, stride_kp, b, cols, TK, 0)
    col_doc = documents_of(K_DOC, stride_kd, b, cols, TK)
    dk, dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    for shared in range(G):
        h = g * G + shared
        query, grad = Q + b64 * sqb + h.to(tl.int64) * sqh, DOUT + b64 * sgb + h.to(tl.int64) * sgh
        first_row = (b * H + h).to(tl.int64) * TQ
        z, reach = spans_of(None if DYNAMIC else SPAN, b, h, H, cols, TQ, False), reach_of(REACH, h, Q_POS is not None)
        far, near = far_and_near(z, z, ramp, reach)
        lo, full_lo, full_hi, hi = queries_seen(
            n0, cols, col, col_doc, Q_POS, Q_DOC, stride_qp, stride_qd, b, TQ, TK, offset, far, near, PLAIN, CAUSAL,
            BM, BN,
        )  # fmt: skip
        bias = BIAS + h * (last_entry + 1) if BIAS is not None else None
        col_bias, dbias = key_bias_of(KEY_BIAS, stride_kb, shared_kb, b, h, cols, TK), tl.zeros([BN], tl.float32)
        for n in range((full_lo - lo + hi - full_hi) // BM):
            m0 = edge_start(n, lo, full_lo, full_hi, BM)
            dk, dv, dbias = edge_gradients(
                dk, dv, dbias, k, v, query, grad, LSE + first_row, DELTA + first_row, m0, n0, b, h, H, col, col_doc,
                col_bias, z, SPAN, reach, bias, Q_POS, Q_DOC, stride_qp, stride_qd, TQ, offset, last_entry,
                max_future, sqt, sgt, scale2, ramp, CAUSAL, DYNAMIC, D, DV, BD, BDV, BM, BN, PRECISION,
            )  # fmt: skip
        if PLAIN:
            for n in range((full_hi - full_lo) // BM):
                m0 = full_lo + n * BM
                q = load_rows(query, m0, sqt, TQ, D, BD, BM, False)
                do = load_rows(grad, m0, sgt, TQ, DV, BDV, BM, False)
                rows = first_row + m0 + tl.arange(0, BM)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2
                p = tl.exp2(s - (tl.load(LSE + rows) * LOG2E)[None, :])
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION) - tl.load(DELTA + rows)[None, :]
                dk = tl.dot((p * dp).to(q.dtype), q, dk, input_precision=PRECISION)
        if DKEY_BIAS is not None:
            tl.store(DKEY_BIAS + (b * H + h).to(tl.int64) * TK + cols, dbias, mask=cols < TK)
    store_rows(DKEY + b64 * sdb + g64 * sdh, dk * scale, n0, sdt, TK, D, BD, BN)
    store_rows(DVALUE + b64 * sfb + g64 * sfh, dv, n0, sft, TK, DV, BDV, BN)


@triton.jit
def queries_seen(
    n0, cols, col, col_doc, Q_POS, Q_DOC, stride_qp, stride_qd, b, TQ, TK, offset, far, near,
    PLAIN: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`tiles_seen` of a tile of keys, among queries. Spans of single queries bound nothing here: tiles that they do not
    reach are skipped one by one."""
    if Q_POS is None:
        first, last = n0 - offset, tl.minimum(n0 + BN, TK) - 1 - offset
        lo, full_lo, full_hi, hi = tiles_seen(first, last, far, near, TQ, BM, not CAUSAL, True)
    else:
        lo, hi = 0, tl.cdiv(TQ, BM) * BM
    if Q_POS is not None or Q_DOC is not None:
        lo, hi = narrow(
            lo, hi, col, col_doc, cols < TK, Q_POS, Q_DOC, stride_qp, stride_qd, b, TQ, offset, far, BM, not CAUSAL,
            True,
        )  # fmt: skip
    if not PLAIN:
        full_lo, full_hi = hi, hi
    return lo, full_lo, full_hi, hi


@triton.jit
def edge_gradients(
    dk, dv, dbias, k, v, query, grad, LSE, DELTA, m0, n0, b, h, H, col, col_doc, col_bias, z, SPAN, reach, bias,
    Q_POS, Q_DOC, stride_qp, stride_qd, TQ, offset, last_entry, max_future, sqt, sgt, scale2, ramp,
    CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
    BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what queries m0 … m0 + BM − 1 give, some of which may not see some keys."""
    rows = m0 + tl.arange(0, BM)
    row = positions_of(Q_POS, stride_qp, b, rows, TQ, offset)
    live = True
    if DYNAMIC:
        z = spans_of(SPAN, b, h, H, rows, TQ, True)
        if Q_POS is None:
            gap = tl.maximum(m0 + offset - n0 - BN + 1, n0 - m0 - BM + 1 - offset)
            live = gap.to(tl.float32) < longest(z, rows, TQ, True) + ramp
    if live:
        q = load_rows(query, m0, sqt, TQ, D, BD, BM, True)
        do = load_rows(grad, m0, sgt, TQ, DV, BDV, BM, True)
        left = ramp_left(row[None, :], col[:, None], z[None, :] if DYNAMIC else z, ramp, CAUSAL)
        t = pair_scores(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), left, row[None, :], col[:, None], None, reach, bias,
            last_entry, max_future, by_row(col_bias), by_column(documents_of(Q_DOC, stride_qd, b, rows, TQ)),
            by_row(col_doc), scale2, CAUSAL,
        )  # fmt: skip
        p = tl.exp2(t - load_lse(LSE, rows, TQ)[None, :])
        if SPAN is not None:
            p = p * weight(left, ramp)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(DELTA + rows, mask=rows < TQ, other=0.0)
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if col_bias is not None:
            dbias += tl.sum(ds, 1)
    return dk, dv, dbias
