"""Small Triton kernels with the merits and the defects that the compile gate must tell apart."""

from __future__ import annotations

import triton
import triton.language as tl

from spanformer.ops.backends.triton.variants import Variant


@triton.jit
def product(Q, K, OUT, tokens, stride, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ATOMIC: tl.constexpr):
    """out[i] = Σ_j q_i·k_j: one product, in a loop without and in one with a mask."""
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + rows[:, None] * stride + dims[None, :])
    total = tl.zeros([BM], tl.float32)
    whole = tokens // BN * BN
    for n0 in tl.range(0, whole, BN):
        at = (n0 + tl.arange(0, BN))[:, None] * stride + dims[None, :]
        total += tl.sum(tl.dot(q, tl.trans(tl.load(K + at))), 1)
    for n0 in tl.range(whole, tokens, BN):
        cols = n0 + tl.arange(0, BN)
        k = tl.load(K + cols[:, None] * stride + dims[None, :], mask=cols[:, None] < tokens, other=0.0)
        s = tl.dot(q, tl.trans(k))
        total += tl.sum(tl.where((rows[:, None] - cols[None, :] >= 0) & (cols[None, :] < tokens), s, 0.0), 1)
    if ATOMIC:
        tl.atomic_add(OUT + rows % 7, total)
    else:
        tl.store(OUT + rows, total)


def variants(head_size: int, arch: str) -> list[Variant]:
    pointers = {"Q": "*bf16", "K": "*bf16", "OUT": "*fp32"}
    names = ("D", "BM", "BN", "ATOMIC")
    signature = pointers | {"tokens": "i32", "stride": "i32"} | dict.fromkeys(names, "constexpr")
    divisible = frozenset({*pointers, "stride"})
    large = (256, 256), 2  # as gfx942 has more registers
    made = []
    for name, tile, warps, atomic in (
        ("good", (64, 64), 4, False),
        ("atomic", (64, 64), 4, True),
        ("spilling", *(large if arch == "gfx942" else ((256, 128), 4)), False),
    ):
        constants = dict(zip(names, (head_size, *tile, atomic), strict=True))
        made.append(Variant(name, product, signature, constants, divisible, warps, 3, tile, 1))
    unaligned = made[0]._replace(name="unaligned", divisible=frozenset())
    return [*made, unaligned]
