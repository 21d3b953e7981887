"""Decoding: one query per row over rings of keys and values (ops/decode/rings.py). One program for a key/value head and
a part of its slots; the query heads that share the slots are the rows of a tile. `merge` of forward.py adds up the
parts.

The slow, obvious version, for the newest position n of a row: at distance d = 0, 1, … lies the key of position
p = n − shift − d, in slot first + p mod capacity; it is seen if d < reach, m(d) > 0 and p ≥ oldest. Sink tokens lie in
the slots before `first`, and are seen with weight 1. The weights and sums are those of forward.py.

A new key and value (NEW_K, NEW_V) count as the slot of position n. The program of the first part writes them there;
no program reads that slot.

Shapes: B batch, H query heads, G of them share a key/value head, N slots of a row.
"""

# Triton compiles these functions; to Python they have other types.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import triton
import triton.language as tl
from spanformer.ops.backends.triton.pairs import LN2, LOG2E, far_and_near, pair_scores, ramp_left, share, weight

RINGS = ("B", "H", "G", "N", "sink_tokens", "shift", "last_entry", "parts", "szb")
"""arguments that are not compiled in"""


@triton.jit(do_not_specialize=RINGS)
def decode(
    Q, KEYS, VALUES, K_SCALES, V_SCALES, FIRST, CAPACITY, NEWEST, OLDEST, NEW_K, NEW_V, OUT, LSE, SPAN, REACH, BIAS,
    B, H, G, N, sink_tokens, shift, last_entry, parts, szb,
    sqb, sqh, skb, skt, svb, svt, sib, sih, sjb, sjh, scale, ramp,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    groups, part = H // G, tl.program_id(1)
    b, g = tl.program_id(0) // groups, tl.program_id(0) % groups
    b64, first, capacity = b.to(tl.int64), tl.load(FIRST + g), tl.load(CAPACITY + g)
    newest, oldest = tl.load(NEWEST + b), sink_tokens + 0 * first
    if OLDEST is not None:
        oldest = tl.maximum(tl.load(OLDEST + b * groups + g), oldest)
    heads, dims, dims_v = g * G + tl.minimum(tl.arange(0, BM), G - 1), tl.arange(0, BD), tl.arange(0, BDV)
    q = tl.load(Q + b64 * sqb + heads[:, None] * sqh + dims[None, :], mask=dims[None, :] < D, other=0.0)
    KEYS, VALUES, slots = KEYS + b64 * skb, VALUES + b64 * svb, b64 * N
    new_k, new_v = new_row(NEW_K, b64 * sib + g * sih, D, BD), new_row(NEW_V, b64 * sjb + g * sjh, DV, BDV)
    if NEW_K is not None:
        to = first + tl.where(newest < sink_tokens, newest - sink_tokens, newest % capacity)
        if (part == 0) & (newest >= 0):
            tl.store(KEYS + to * skt + dims, new_k.to(KEYS.dtype.element_ty), mask=dims < D)
            tl.store(VALUES + to * svt + dims_v, new_v.to(VALUES.dtype.element_ty), mask=dims_v < DV)
    z = tl.load(SPAN + b * szb + heads).to(tl.float32) if SPAN is not None else None
    reach = tl.load(REACH + heads) if REACH is not None else None
    far, _ = far_and_near(most(z), most(z), ramp, most(reach))
    seen = tl.maximum(tl.minimum(tl.minimum(far, capacity - shift), newest + 1 - shift), 0).to(tl.int32)
    acc, total = tl.zeros([BM, BDV], tl.float32), tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    begin, end = share(tl.cdiv(seen, BN), part, parts)
    for n in range(begin, end):
        d = begin * 0 + n * BN + tl.arange(0, BN)
        position = newest - shift - d
        there, slot = (d < seen) & (position >= oldest), first + position % capacity
        k = rows_at(KEYS, new_k, slot, there, position != newest, skt, D, BD)
        s = scaled(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION), K_SCALES, slots + slot, there)
        left = ramp_left(tl.zeros([BM, 1], tl.int32), -d[None, :], z[:, None] if SPAN is not None else None, ramp, True)
        t = pair_scores(
            s, left, tl.zeros([BM, 1], tl.int32), -d[None, :], there[None, :],
            reach[:, None] if REACH is not None else None,
            BIAS + heads[:, None] * (last_entry + 1) if BIAS is not None else None, last_entry, 0, None, None, None,
            scale * LOG2E, True,
        )  # fmt: skip
        v = rows_at(VALUES, new_v, slot, there, position != newest, svt, DV, BDV).to(q.dtype)
        acc, total, top = add_slots(acc, total, top, t, weight(left, ramp), v, V_SCALES, slots + slot, there, PRECISION)
    for n in range(tl.where(part == 0, tl.cdiv(sink_tokens, BN), 0)):  # sink tokens are seen at any distance
        position = n * BN + tl.arange(0, BN)
        there, slot = (position < sink_tokens) & (position <= newest - shift), first + position - sink_tokens
        k = rows_at(KEYS, new_k, slot, there, position != newest, skt, D, BD)
        s = scaled(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION), K_SCALES, slots + slot, there)
        t = tl.where(there[None, :], s * (scale * LOG2E), float("-inf"))
        v = rows_at(VALUES, new_v, slot, there, position != newest, svt, DV, BDV).to(q.dtype)
        acc, total, top = add_slots(acc, total, top, t, None, v, V_SCALES, slots + slot, there, PRECISION)
    total = tl.where(total == 0.0, 1.0, total)
    row, real = (part * B + b) * H + g * G + tl.arange(0, BM), tl.arange(0, BM) < G
    at = OUT + row.to(tl.int64)[:, None] * DV + dims_v[None, :]
    tl.store(at, acc / total[:, None], mask=real[:, None] & (dims_v[None, :] < DV))
    tl.store(LSE + row, (top + tl.log2(total)) * LN2, mask=real)


@triton.jit
def most(x):
    return tl.max(x, 0) if x is not None else None


@triton.jit
def scaled(x, SCALES, at, there):
    """x [BM, BN] times the scale of each 8-bit row."""
    return x * tl.load(SCALES + at, mask=there, other=0.0)[None, :] if SCALES is not None else x


@triton.jit
def new_row(NEW, at, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The new key or value of this head; None if there is none."""
    dims = tl.arange(0, BLOCK)
    return tl.load(NEW + at + dims, mask=dims < SIZE, other=0.0) if NEW is not None else None


@triton.jit
def rows_at(X, new, slot, there, old, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [BN, BLOCK] in these slots; 0 where not `there`. Those that are not old are `new`, if it is given."""
    dims = tl.arange(0, BLOCK)
    stored = there & old if new is not None else there
    at = X + slot[:, None] * stride + dims[None, :]
    x = tl.load(at, mask=stored[:, None] & (dims[None, :] < SIZE), other=0)
    if new is not None:
        x = tl.where(stored[:, None] | (there[:, None] == 0), x, new[None, :].to(x.dtype))
    return x


@triton.jit
def add_slots(acc, total, top, t, m, v, SCALES, at, there, PRECISION: tl.constexpr):
    """As `add_tile` of forward.py, for values that may have scales."""
    new = tl.maximum(top, tl.max(t, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p, keep = tl.exp2(t - safe[:, None]), tl.exp2(top - safe)
    if m is not None:
        p = p * m
    total = total * keep + tl.sum(p, 1)
    acc = tl.dot(scaled(p, SCALES, at, there).to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, total, new
