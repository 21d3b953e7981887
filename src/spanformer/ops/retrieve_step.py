"""One decoding step over stores of keys and values: the new token is stored, and each head reads its k best rows, in
one call of the compiled kernel (csrc/retrieve.h). ops/retrieve.py does it in PyTorch, for many queries and gradients.

Shapes: B batch, G KV heads that have a store, M = B·G stores, H query heads, Hkv KV heads, D and Dv head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.attended import Attended
from spanformer.ops.c_layout import RETRIEVE
from spanformer.ops.search import Codes

Pair = tuple[Tensor, Tensor]


def kernel_serves(codes: Codes, q: Tensor) -> bool:
    return q.dtype == torch.float32 and q.device.type == "cpu" and codes.bits == 8 and not kernel.problem()


@torch.no_grad()
def attend_step(
    codes: Codes, stored: Pair, groups: Tensor, q: Tensor, new: Pair | None, kv_heads: int, count: int,
    near: Attended, k: int, scale: float,
) -> tuple[Attended, Tensor]:  # fmt: skip
    """q [B, H, 1, D] over the k best of the first `count` rows, joined with what was attended to nearby (out
    [B, H, 1, Dv], lse [B, H, 1]); certificates [B, G·H/Hkv, 1]. codes and stored (keys [M, room, D], values
    [M, room, Dv]) have room for a row more; groups [G] int64 are their KV heads; new: key and value [B, Hkv, 1, ·] to
    store there first, None: nothing."""
    (b, h, _, d), (keys, values), at = q.shape, stored, -1
    out, lse = near.out.clone(), near.lse.clone(memory_format=torch.contiguous_format)
    share, written = q.new_empty(b, len(groups) * h // kv_heads, 1), (0,) * 8
    if new is not None:
        at, written = codes.count, (*kernel.rows(new[0]), *kernel.rows(new[1]))
        codes.count += 1
    assert codes.scales is not None and q.stride(3) == 1 and out.stride(3) == 1
    assert keys.stride(1) == d and values.stride(1) == values.shape[2] and codes.rows.stride(1) == d
    packed = RETRIEVE.struct.pack(
        torch.get_num_threads(), b, len(groups), h, kv_heads, d, values.shape[2], k, max(0, count), at, scale,
        groups.data_ptr(), codes.rows.data_ptr(), codes.rows.stride(0), codes.scales.data_ptr(),
        codes.scales.stride(0), codes.error.data_ptr(), codes.longest.data_ptr(), keys.data_ptr(), keys.stride(0),
        values.data_ptr(), values.stride(0), *kernel.rows(q), *written, *kernel.rows(out), lse.data_ptr(),
        share.data_ptr(),
    )  # fmt: skip
    kernel.library().retrieve(packed)
    return Attended(out, lse), share
