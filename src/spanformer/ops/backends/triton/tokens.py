"""What kernels load for a tile of queries or keys: positions, spans, documents, biases of keys."""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import FAR

INTEGERS = (
    "B", "H", "G", "TQ", "TK", "offset", "last_entry", "max_future", "stride_kb", "shared_kb", "stride_qp", "stride_kp",
    "stride_qd", "stride_kd",
)  # fmt: skip
"""arguments of every kernel that are not compiled in: lengths change from call to call"""


@triton.jit
def head_of_rank(rank, SPAN, REACH, ramp, N, G, HEADS: tl.constexpr):
    """Of N groups of G heads, the one that looks rank-th farthest: what runs longest must not start last. Every program
    sorts the heads, which is cheaper than to launch a kernel for it. HEADS: at least N, a power of two."""
    group = tl.arange(0, HEADS)
    longest_far = tl.full([HEADS], -1.0 * FAR, tl.float32)
    for n in range(G):
        far, head = tl.full([HEADS], 1.0 * FAR, tl.float32), group * G + n
        if SPAN is not None:
            far = tl.load(SPAN + head, mask=group < N, other=0.0).to(tl.float32) + ramp
        if REACH is not None:
            far = tl.minimum(far, tl.load(REACH + head, mask=group < N, other=0).to(tl.float32))
        longest_far = tl.maximum(longest_far, tl.where(far == far, far, 1.0 * FAR))
    far = tl.where(group < N, longest_far, -2.0 * FAR)
    before = group[None, :] < group[:, None]
    before = (far[None, :] > far[:, None]) | ((far[None, :] == far[:, None]) & before)
    return tl.sum(tl.where(tl.sum(before.to(tl.int32), 1) == rank, group, 0), 0)


@triton.jit
def locate(pid, SPAN, REACH, ramp, B, N, G, blocks, HEADS: tl.constexpr, DYNAMIC: tl.constexpr):
    """(n-th block, batch row, group of G heads) of a program. Groups that look far come first."""
    rank = pid // (B * blocks)
    ALIKE: tl.constexpr = (SPAN is None and REACH is None) or DYNAMIC
    group = rank if ALIKE else head_of_rank(rank, SPAN, REACH, ramp, N, G, HEADS)
    return pid // B % blocks, pid % B, group


@triton.jit
def positions_of(POS, stride, b, index, N, offset):
    """Positions of tokens: given ones (int64), or their index plus an offset (int32)."""
    return index + offset if POS is None else tl.load(POS + b * stride + index, mask=index < N, other=0) + offset


@triton.jit
def documents_of(DOC, stride, b, index, N):
    return tl.load(DOC + b * stride + index, mask=index < N, other=0) if DOC is not None else None


@triton.jit
def key_bias_of(KEY_BIAS, stride_b, shared, b, h, index, N):
    """The bias of keys for query head h; `shared` query heads have one row."""
    if KEY_BIAS is None:
        bias = None
    else:
        row = KEY_BIAS + b.to(tl.int64) * stride_b + (h // shared).to(tl.int64) * N
        bias = tl.load(row + index, mask=index < N, other=0.0).to(tl.float32)
    return bias


@triton.jit
def spans_of(SPAN, b, h, H, rows, TQ, DYNAMIC: tl.constexpr):
    """Spans of the rows, or the head's span; None without spans."""
    if SPAN is None:
        z = None
    else:
        if DYNAMIC:
            z = tl.load(SPAN + (b * H + h).to(tl.int64) * TQ + rows, mask=rows < TQ, other=0.0).to(tl.float32)
        else:
            z = tl.load(SPAN + h).to(tl.float32)
    return z


@triton.jit
def shortest(z, rows, TQ, DYNAMIC: tl.constexpr):
    if z is not None and DYNAMIC:
        z = tl.min(tl.where(rows < TQ, z, float("inf")), 0)
    return z


@triton.jit
def longest(z, rows, TQ, DYNAMIC: tl.constexpr):
    if z is not None and DYNAMIC:
        z = tl.max(tl.where(rows < TQ, z, float("-inf")), 0)
    return z


@triton.jit
def reach_of(REACH, h, WIDE: tl.constexpr):
    """WIDE: as int64, for given positions; else at most FAR, in 32 bits."""
    return None if REACH is None else tl.load(REACH + h) if WIDE else tl.minimum(tl.load(REACH + h), FAR).to(tl.int32)


@triton.jit
def narrow(
    lo, hi, own, own_doc, own_inside, POS, DOC, stride_p, stride_d, b, N, offset, far,
    B: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The part of [lo, hi) from the first tile to the last one in which others may be seen from positions `own` and
    documents `own_doc`. It reads only ids, so that the main loop needs no branches."""
    wide = tl.where(far >= FAR, 1 << 41, far.to(tl.int64))
    low = tl.min(tl.where(own_inside, own.to(tl.int64), 1 << 42), 0)
    high = tl.max(tl.where(own_inside, own.to(tl.int64), -(1 << 42)), 0)
    if BACK:
        low = low - wide + 1
    if AHEAD:
        high = high + wide - 1
    if DOC is not None:
        low_doc = tl.min(tl.where(own_inside, own_doc, (1 << 63) - 1), 0)
        high_doc = tl.max(tl.where(own_inside, own_doc, -(1 << 63)), 0)
    first, last = hi, lo
    for n0 in range(lo, hi, B):
        index = n0 + tl.arange(0, B)
        at = positions_of(POS, stride_p, b, index, N, offset).to(tl.int64)
        seen = (index < N) & (at >= low) & (at <= high)
        if DOC is not None:
            doc = documents_of(DOC, stride_d, b, index, N)
            seen = seen & (doc >= low_doc) & (doc <= high_doc)
        some = tl.max(seen.to(tl.int32), 0) > 0
        first = tl.where(some, tl.minimum(first, n0), first)
        last = tl.where(some, n0 + B, last)
    return first, tl.maximum(last, first)
