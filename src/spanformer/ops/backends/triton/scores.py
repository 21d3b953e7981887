"""Scores of a tile of queries over a tile of keys, in the forward pass and for the gradients of queries."""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import by_column, by_row, pair_scores, ramp_left, tiles_seen
from spanformer.ops.backends.triton.tokens import documents_of, key_bias_of, narrow, positions_of


@triton.jit
def keys_seen(
    block, rows, row, row_doc, K_POS, K_DOC, stride_kp, stride_kd, b, TQ, TK, offset, far, near,
    PLAIN: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`tiles_seen` of a tile of queries. PLAIN: whether tiles can be full; only a mask knows some terms."""
    if K_POS is None:
        first = block * BM + offset
        last = tl.minimum(block * BM + BM, TQ) - 1 + offset
        lo, full_lo, full_hi, hi = tiles_seen(first, last, far, near, TK, BN, True, not CAUSAL)
    else:
        lo, hi = 0, tl.cdiv(TK, BN) * BN
    if K_POS is not None or K_DOC is not None:
        lo, hi = narrow(
            lo, hi, row, row_doc, rows < TQ, K_POS, K_DOC, stride_kp, stride_kd, b, TK, 0, far, BN, True, not CAUSAL
        )
    if not PLAIN:
        full_lo, full_hi = hi, hi
    return lo, full_lo, full_hi, hi


@triton.jit
def edge_scores(
    q, k, left, n0, b, h, row, row_doc, reach, BIAS, KEY_BIAS, K_POS, K_DOC, TK, last_entry, max_future,
    stride_kb, shared_kb, stride_kp, stride_kd, scale2, CAUSAL: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`pair_scores` of keys n0 … n0 + BN − 1, some of which may be hidden, on the ramp or beyond the last."""
    cols = n0 + tl.arange(0, BN)
    inside = None if CAUSAL and K_POS is None else (cols < TK)[None, :]
    return pair_scores(
        tl.dot(q, tl.trans(k), input_precision=PRECISION), left, row[:, None],
        positions_of(K_POS, stride_kp, b, cols, TK, 0)[None, :], inside, reach,
        BIAS + h * (last_entry + 1) if BIAS is not None else None, last_entry, max_future,
        by_column(key_bias_of(KEY_BIAS, stride_kb, shared_kb, b, h, cols, TK)), by_row(row_doc),
        by_column(documents_of(K_DOC, stride_kd, b, cols, TK)), scale2, CAUSAL,
    )  # fmt: skip


@triton.jit
def edge_ramp(n0, b, row, z, ramp, K_POS, stride_kp, TK, CAUSAL: tl.constexpr, DYNAMIC: tl.constexpr, BN: tl.constexpr):
    """`ramp_left` of these keys."""
    col = positions_of(K_POS, stride_kp, b, n0 + tl.arange(0, BN), TK, 0)
    return ramp_left(row[:, None], col[None, :], z[:, None] if DYNAMIC else z, ramp, CAUSAL)
