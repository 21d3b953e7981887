"""What all kernels share: which tiles a tile sees, and the score and weight of a pair.

The slow, obvious version, for a query at position i and a key at position j:

    d = i − j − shift                  |d| without `causal`
    s = scale · q·k + distance_bias[d] + key_bias[j]
    m = clip((ramp + span − d) / ramp, 0, 1)
    seen = d ≥ 0 and d < reach and m > 0 and both are of one document

Here scores count in powers of two (s · log2 e), which exp2 takes, and a tile whose pairs are all seen with m = 1 is
"full": it needs no mask. Vectors of queries come as [BM, 1] and of keys as [1, BN], or as [1, BM] and [BN, 1] for
transposed tiles, so one function serves both.
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR: tl.constexpr = tl.constexpr(1 << 30)  # beyond any distance of tokens without explicit positions


@triton.jit
def far_and_near(z_low, z_high, ramp, reach):
    """Distances 0 … far − 1 may have weight and 0 … near − 1 have weight 1, under spans between z_low and z_high.
    None: no span, no reach."""
    far = tl.full([], FAR, tl.int32)
    near = far
    if z_high is not None:
        high, low = tl.minimum(z_high, 1.0 * FAR), tl.minimum(z_low, 1.0 * FAR)
        whole = tl.floor(high)  # added to the whole span, a short ramp would be rounded away
        far = tl.minimum(whole + tl.ceil(high - whole + ramp), 1.0 * FAR).to(tl.int32)
        near = tl.floor(low).to(tl.int32) + 1
    if reach is not None:
        far, near = tl.minimum(far, reach).to(tl.int32), tl.minimum(near, reach).to(tl.int32)
    return far, near


@triton.jit
def tiles_seen(first, last, far, near, N, B: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr):
    """Of N others in tiles of B: those that positions first … last see lie in [lo, hi), those that all of them see with
    weight 1 in [full_lo, full_hi). BACK, AHEAD: whether they see others behind and ahead of them. Multiples of B."""
    lo, full_lo, hi, full_hi = first, last, last + 1, first + 1
    if BACK:
        lo, full_lo = first - far + 1, last - near + 1
    if AHEAD:
        hi, full_hi = last + far, first + near
    lo = tl.minimum(tl.maximum(lo, 0), N) // B * B
    hi = tl.maximum(tl.cdiv(tl.minimum(tl.maximum(hi, 0), N), B) * B, lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.minimum(tl.maximum(full_lo, 0), N), B) * B, lo), hi)
    full_hi = tl.maximum(tl.minimum(tl.minimum(tl.maximum(full_hi, 0), N) // B * B, hi), full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def edge_start(n, lo, full_lo, full_hi, B: tl.constexpr):
    """Where the n-th tile begins that needs a mask: those before the full ones, then those after them."""
    before = (full_lo - lo) // B
    return tl.where(n < before, lo + n * B, full_hi + (n - before) * B)


@triton.jit
def share(count, part, parts):
    """This part's [begin, end) of `count` tiles; nothing for parts beyond the last."""
    return count * tl.minimum(part, parts) // parts, count * tl.minimum(part + 1, parts) // parts


@triton.jit
def by_row(x):
    """[BM] → [BM, 1]; None stays None."""
    return x[:, None] if x is not None else None


@triton.jit
def by_column(x):
    return x[None, :] if x is not None else None


@triton.jit
def load_rows(X, first, stride, N, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):
    """Rows first … first + ROWS − 1 of a head, in blocks of BLOCK columns of which SIZE are real. MASK: rows from N on
    are 0. Offsets of long texts need 64 bits; within a tile, 32 are enough."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = X + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if MASK:
        if BLOCK == SIZE:
            x = tl.load(at, mask=rows[:, None] < N - first, other=0.0)
        else:
            x = tl.load(at, mask=(rows[:, None] < N - first) & (dims[None, :] < SIZE), other=0.0)
    else:
        x = tl.load(at) if BLOCK == SIZE else tl.load(at, mask=dims[None, :] < SIZE, other=0.0)
    return x


@triton.jit
def store_rows(X, x, first, stride, N, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = X + first.to(tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    tl.store(at, x.to(X.dtype.element_ty), mask=(rows[:, None] < N - first) & (dims[None, :] < SIZE))


@triton.jit
def ramp_left(row, col, z, ramp, CAUSAL: tl.constexpr):
    """What is left of the ramp, so that the weight m of a pair is min(left / ramp, 1); None without spans."""
    if z is None:
        left = None
    else:
        d = row - col if CAUSAL else tl.abs(row - col)
        left = (z - d.to(tl.float32)) + ramp  # z − d first: on the ramp the two are close, and the difference exact
    return left


@triton.jit
def pair_scores(
    s, left, row, col, inside, reach, BIAS, last_entry, max_future, key_bias, row_doc, col_doc, scale2,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile's pairs in powers of two, −∞ where hidden. s: q·k; left: `ramp_left`; row and col: positions;
    inside: which pairs exist, None if d or lse hides the others; BIAS: this head's table. Absent terms are None."""
    d = row - col
    if CAUSAL:
        seen = d >= 0
        away = d
    else:
        seen = d == d
        away = tl.abs(d)
    if inside is not None:
        seen = seen & inside
    if reach is not None:
        seen = seen & (away < reach)
    if left is not None:
        seen = seen & (left > 0.0)
    if row_doc is not None:
        seen = seen & (row_doc == col_doc)
    t = s * scale2
    if BIAS is not None:
        entry = tl.where(max_future > 0, d + max_future, away)
        entry = tl.minimum(tl.maximum(entry, 0), last_entry)
        t += tl.load(BIAS + entry, mask=seen, other=0.0) * LOG2E
    if key_bias is not None:
        t += key_bias * LOG2E
    return tl.where(seen, t, float("-inf"))


@triton.jit
def weight(left, ramp):
    """m of pairs on the ramp or before it; None without spans."""
    return tl.minimum(left * (1.0 / ramp), 1.0) if left is not None else None


@triton.jit
def load_lse(LSE, rows, T):
    """In powers of two. Rows that saw nothing, and rows beyond the last, get +∞: exp2(score − ∞) is 0."""
    lse = tl.load(LSE + rows, mask=rows < T, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
