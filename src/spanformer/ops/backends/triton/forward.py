"""The forward pass: one program for a tile of BM queries of one head. It reads its spans, works out which tiles of keys
they see, and runs two loops: over the tiles that need a mask (the ramp and the diagonal), and over the full ones.

The slow, obvious version, with s, m and `seen` of pairs.py:

    p_ij = m_ij · exp(s_ij) where seen, else 0
    out_i = Σ_j p_ij · v_j / (exp(sink) + Σ_j p_ij)        lse_i = log(exp(sink) + Σ_j p_ij)

With SPLIT, a part of the keys: `merge` adds up the parts. Few queries (decoding) then still keep a GPU busy.

Shapes: B batch, H query heads, G query heads of a key/value head, TQ and TK tokens, D and DV head sizes in blocks of BD
and BDV, L entries of a table.
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import (
    LN2,
    LOG2E,
    edge_start,
    far_and_near,
    load_rows,
    share,
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
def add_tile(acc, total, top, t, m, v, PRECISION: tl.constexpr):
    """One tile more: t [BM, BN] scores, m weights or None; acc [BM, DV], total [BM] and top [BM] so far."""
    new = tl.maximum(top, tl.max(t, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # a row that saw nothing yet
    p = tl.exp2(t - safe[:, None])
    if m is not None:
        p = p * m
    keep = tl.exp2(top - safe)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, total * keep + tl.sum(p, 1), new


@triton.jit
def add_full_tile(acc, total, top, s, v, scale2, PRECISION: tl.constexpr):
    """`add_tile` where every pair is seen with weight 1; s: q·k."""
    new = tl.maximum(top, tl.max(s, 1) * scale2)
    p = tl.exp2(s * scale2 - new[:, None])
    keep = tl.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, total * keep + tl.sum(p, 1), new


@triton.jit(do_not_specialize=(*INTEGERS, "parts", "least"))
def forward(
    Q, K, V, OUT, LSE, PARTS, LSES, SPAN, REACH, BIAS, KEY_BIAS, SINK, Q_POS, K_POS, Q_DOC, K_DOC,
    B, H, G, TQ, TK, offset, last_entry, max_future, stride_kb, shared_kb, stride_qp, stride_kp, stride_qd, stride_kd,
    parts, least, sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, scale, ramp,
    CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PLAIN: tl.constexpr = BIAS is None and KEY_BIAS is None and K_POS is None and K_DOC is None
    blocks, part = tl.cdiv(TQ, BM), tl.program_id(0) % parts
    block, b, h = locate(tl.program_id(0) // parts, SPAN, REACH, ramp, B, H, 1, blocks, HEADS, DYNAMIC)
    block = blocks - 1 - block  # in causal attention the last ones see most
    rows = block * BM + tl.arange(0, BM)
    b64, scale2 = b.to(tl.int64), scale * LOG2E
    q = load_rows(Q + b64 * sqb + h.to(tl.int64) * sqh, block * BM, sqt, TQ, D, BD, BM, True)
    K += b64 * skb + (h // G).to(tl.int64) * skh
    V += b64 * svb + (h // G).to(tl.int64) * svh
    z = spans_of(SPAN, b, h, H, rows, TQ, DYNAMIC)
    reach = reach_of(REACH, h, Q_POS is not None)
    far, near = far_and_near(shortest(z, rows, TQ, DYNAMIC), longest(z, rows, TQ, DYNAMIC), ramp, reach)
    row = positions_of(Q_POS, stride_qp, b, rows, TQ, offset)
    row_doc = documents_of(Q_DOC, stride_qd, b, rows, TQ)
    lo, full_lo, full_hi, hi = keys_seen(
        block, rows, row, row_doc, K_POS, K_DOC, stride_kp, stride_kd, b, TQ, TK, offset, far, near,
        PLAIN, CAUSAL, BM, BN,
    )  # fmt: skip
    split = parts
    if SPLIT:
        split = tl.where((hi - lo) // BN > least, parts, 1)
    acc, total = tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    first, last = share((full_lo - lo + hi - full_hi) // BN, part, split)
    for n in range(first, last):
        n0 = edge_start(n, lo, full_lo, full_hi, BN)
        k = load_rows(K, n0, skt, TK, D, BD, BN, True)
        left = edge_ramp(n0, b, row, z, ramp, K_POS, stride_kp, TK, CAUSAL, DYNAMIC, BN)
        t = edge_scores(
            q, k, left, n0, b, h, row, row_doc, reach, BIAS, KEY_BIAS, K_POS, K_DOC, TK, last_entry, max_future,
            stride_kb, shared_kb, stride_kp, stride_kd, scale2, CAUSAL, BN, PRECISION,
        )  # fmt: skip
        v = load_rows(V, n0, svt, TK, DV, BDV, BN, True)
        acc, total, top = add_tile(acc, total, top, t, weight(left, ramp), v, PRECISION)
    if PLAIN:
        first, last = share((full_hi - full_lo) // BN, part, split)
        for n in range(first, last):
            k = load_rows(K, full_lo + n * BN, skt, TK, D, BD, BN, False)
            v = load_rows(V, full_lo + n * BN, svt, TK, DV, BDV, BN, False)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            acc, total, top = add_full_tile(acc, total, top, s, v, scale2, PRECISION)
    LSE, whole = LSE + (b * H + h).to(tl.int64) * TQ, TQ
    if SPLIT:
        first_row = (part.to(tl.int64) * B * H + b * H + h) * TQ
        whole = tl.where((split == 1) & (part == 0), TQ, 0)
        store_part(acc, total, top, PARTS + first_row * DV, LSES + first_row, block * BM, whole,
                   tl.where(split > 1, TQ, 0), DV, BDV, BM)  # fmt: skip
    acc, total, top = add_sink(acc, total, top, SINK, h)
    total = tl.where(total == 0.0, 1.0, total)
    OUT += b64 * sob + h.to(tl.int64) * soh
    store_rows(OUT, acc / total[:, None], block * BM, sot, whole, DV, BDV, BM)
    tl.store(LSE + rows, (top + tl.log2(total)) * LN2, mask=rows < whole)


@triton.jit
def store_part(acc, total, top, PARTS, LSES, m0, whole, split, DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr):
    """Rows below `split` are a part for `merge`; those below `whole` are marked as done, by an lse of ∞."""
    rows, total = m0 + tl.arange(0, BM), tl.where(total == 0.0, 1.0, total)
    store_rows(PARTS, acc / total[:, None], m0, DV, split, DV, BDV, BM)
    tl.store(LSES + rows, tl.where(rows < split, (top + tl.log2(total)) * LN2, float("inf")), mask=rows < split + whole)


@triton.jit
def add_sink(acc, total, top, SINK, h):
    """The sink logit is one more entry of the softmax, without a value."""
    if SINK is not None:
        sink = tl.load(SINK + h).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp2(top - safe)
        acc, total, top = acc * keep[:, None], total * keep + tl.exp2(sink - safe), new
    return acc, total, top


@triton.jit(do_not_specialize=("H", "T", "R", "parts"))
def merge(PARTS, LSES, SINK, OUT, LSE, H, T, R, parts, sob, soh, sot, DV: tl.constexpr, BDV: tl.constexpr,
          BM: tl.constexpr):  # fmt: skip
    """Attention over all keys from its parts: PARTS [parts, R, DV] and LSES [parts, R] with R = B · H · T rows. Rows
    whose first part says ∞ are done already."""
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BDV)
    inside = rows < R
    inside = inside & (tl.load(LSES + rows, mask=inside, other=0.0) < float("inf"))
    acc, total = tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    for _ in range(parts):
        lse = tl.load(LSES + rows, mask=inside, other=float("-inf")) * LOG2E
        at = PARTS + rows[:, None] * DV + dims[None, :]
        some = tl.load(at, mask=inside[:, None] & (dims[None, :] < DV), other=0.0)
        LSES, PARTS = LSES + R, PARTS + R * DV
        new = tl.maximum(top, lse)
        safe = tl.where(new == float("-inf"), 0.0, new)
        keep, weight = tl.exp2(top - safe), tl.exp2(lse - safe)
        acc = acc * keep[:, None] + some * weight[:, None]
        total, top = total * keep + weight, new
    h, b, t = rows // T % H, rows // (T * H), rows % T
    acc, total, top = add_sink(acc, total, top, SINK, h)
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    at = OUT + b.to(tl.int64) * sob + h.to(tl.int64) * soh + t.to(tl.int64) * sot
    tl.store(at[:, None] + dims[None, :], acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (dims[None, :] < DV))
    tl.store(LSE + rows, (top + tl.log2(total)) * LN2, mask=inside)
