"""Decoding from the rings of buckets by the native kernel: one query per row over the rings of its own buckets, one
softmax over all rounds (`memory/buckets.py` does the same in PyTorch).

Shapes: N rows (batch · heads), R rounds, D and Dv head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import unserved_transforms
from spanformer.ops.buckets import Placed, Seen
from spanformer.ops.c_layout import BUCKETS


class BucketRings(NamedTuple):
    """What a memory holds, and how its slots are laid out."""

    keys: Tensor
    """[…, R, slots, D], contiguous, with one row of D for each slot"""
    values: Tensor
    """[…, R, slots, Dv]"""
    marks: Tensor
    """[…, R, slots, R + 1] int64: the place of a slot's token in every round, and its document"""
    counts: Tensor
    """[…, R, buckets] int64: tokens of each bucket so far"""
    capacity: int
    """slots of a bucket's ring"""
    gap: int
    """between the places of two buckets"""


def served(new: Placed, rings: BucketRings, seen: Seen) -> bool:
    """Whether the kernel reads and writes these rings for one new token per row."""
    tensors = [new.q, new.v, rings.keys, rings.values]
    return (
        new.q.shape[1] == 1
        and seen.backend in ("auto", "native")
        and not seen.dropout
        and all(type(t) is Tensor and t.device.type == "cpu" and t.dtype == new.q.dtype for t in tensors)
        and new.q.dtype in kernel.DTYPES
        and max(new.q.shape[2], new.v.shape[2]) <= kernel.MAX_HEAD_SIZE
        and not (torch.is_grad_enabled() and (new.q.requires_grad or new.v.requires_grad))
        and not torch.compiler.is_compiling()
        and all(t.is_contiguous() for t in rings[:4])
        and not unserved_transforms("native")
        and kernel.problem() is None
    )


def attend_one(new: Placed, rings: BucketRings, seen: Seen) -> Attended:
    """out [N, 1, Dv] and lse [N, 1]; zeros and −∞ for a row that sees nothing."""
    out, lse = torch.empty_like(new.v), torch.empty(new.v.shape[:2])
    _call(new, rings, seen, (out, lse))
    return Attended(out, lse)


def write_one(new: Placed, rings: BucketRings) -> None:
    """Put each row's token into the rings of its buckets, over the oldest there."""
    _call(new, rings, Seen(0), None)


def _call(new: Placed, rings: BucketRings, seen: Seen, into: tuple[Tensor, Tensor] | None) -> None:
    assert new.k is not None
    (n, _, d), (rounds, slots), dv = new.q.shape, rings.keys.shape[-3:-1], new.v.shape[2]
    q, k, v, ids = (t.contiguous() for t in (new.q, new.k, new.v, new.ids))
    documents = None if new.documents is None else new.documents.contiguous()
    span = None if seen.span is None else seen.span.detach().float().contiguous()
    packed = BUCKETS.struct.pack(
        into is None, kernel.DTYPES[q.dtype], torch.get_num_threads(), n, rounds, rings.capacity,
        rings.counts.shape[-1], slots, d, dv, rings.gap, seen.reach, seen.itself, seen.scale, seen.ramp,
        _address(span), q.data_ptr(), k.data_ptr(), v.data_ptr(), ids.data_ptr(), _address(documents),
        rings.keys.data_ptr(), rings.values.data_ptr(), rings.marks.data_ptr(), rings.counts.data_ptr(),
        *((0, 0) if into is None else (t.data_ptr() for t in into)),
    )  # fmt: skip
    kernel.library().bucket_decode(packed)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
