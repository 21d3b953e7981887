"""Linear attention by the compiled CPU kernel (csrc/linear_forward.h, csrc/linear_backward.h), with autograd.

Shapes: B batch, H query heads, Hkv key/value heads, T tokens, m features, Dv size of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops import c_layout, kernel
from spanformer.ops.backends.base import refuse_second_derivative
from spanformer.ops.kernel import DTYPES, as_laid, rows
from spanformer.ops.linear.call import Divide, LinearCall, LinearState

Inputs = Sequence[Tensor | None]
"""a, b, v, decay, near, s and z of a call"""
LINEAR = c_layout.LINEAR.struct
_DIVIDE = {"sum": 1, "rms": 2, "clamped": 3}  # Normalize of csrc/call.h
_NO_ROWS = (0, 0, 0, 0)
_NO_GRADIENTS = (*_NO_ROWS * 4, *(0,) * 7)


class Fixed(NamedTuple):
    """What a call holds besides tensors with gradients."""

    starts: Tensor | None
    ramp: float
    divide: Divide | None
    elu: bool


def unusable() -> list[str]:
    """Why the kernel cannot run on this machine; [] if it can."""
    problem = kernel.problem()
    return [problem] if problem else []


def run_native(call: LinearCall) -> tuple[Tensor, Tensor, LinearState | None]:
    decay = None if call.decay is None else call.decay.float()
    near = None if call.near is None else call.near.float()
    s, z = (None, None) if call.state is None else call.state
    inputs = (call.a, call.b, call.v, decay, near, s, z)
    fixed = Fixed(call.starts, call.ramp, call.divide, call.elu)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        out, den, s1, z1 = _Linear.apply(*inputs, fixed)
    else:
        out, den, s1, z1 = run_forward(laid(inputs), fixed)
    state = None if s1 is None or z1 is None else LinearState(s1, z1)
    return out, lse_of(call.divide, den), state


def lse_of(divide: Divide | None, den: Tensor) -> Tensor:
    """lse [B, H, T] of what the kernel divided by; without a division, the denominator itself."""
    if divide is None:
        return den
    if divide.by == "rms":
        return torch.zeros_like(den)
    if divide.by == "clamped" or not den.requires_grad:
        return den.log()  # −inf where it is 0
    nothing = den == 0
    return torch.where(nothing, -math.inf, torch.where(nothing, 1, den).log())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *inputs, fixed = arguments
        given = laid(inputs)
        results = run_forward(given, fixed)
        ctx.save_for_backward(*given, *results, fixed.starts)  # autograd then refuses starts that were changed in place
        ctx.fixed = fixed
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative("native")
        saved = ctx.saved_tensors
        return *run_backward(saved[:7], ctx.fixed, saved[7:11], grads, ctx.needs_input_grad), None


def laid(inputs: Sequence[Tensor | None]) -> Inputs:
    """As the kernel reads them: rows of a, b and v contiguous, everything else wholly."""
    return [*map(_dense, inputs[:3]), *(None if t is None else as_laid(t) for t in inputs[3:])]


def _dense(t: Tensor | None) -> Tensor | None:
    return t if t is None or (t.stride(3) == 1 and 1 not in t.stride()[:3] and not t.is_neg()) else as_laid(t)


def run_forward(inputs: Inputs, fixed: Fixed) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    a, _, v, _, near, *_ = inputs
    assert a is not None and v is not None
    (batch, heads, tokens, m), (kv, dv) = a.shape, v.shape[1::2]
    out = torch.empty_like(a) if m == dv else a.new_empty((batch, heads, tokens, dv))
    den = a.new_empty((batch, heads, tokens), dtype=torch.float32)
    s1 = z1 = None
    if near is None:
        s1 = a.new_empty((batch, kv, m, dv), dtype=torch.float32)
        z1 = s1.new_empty((batch, kv, m))
    kernel.library().linear_forward(_pack(inputs, fixed, (out, den, s1, z1), _NO_GRADIENTS))
    return out, den, s1, z1


def run_backward(
    inputs: Inputs, fixed: Fixed, results: Inputs, grads: Inputs, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the seven inputs; None where not wanted."""
    a, b, v, decay, near, s, z = inputs
    g_out, g_den, g_s1, g_z1 = grads
    assert a is not None and b is not None and v is not None
    assert results[0] is not None
    g = _dense(torch.zeros_like(results[0]) if g_out is None else g_out)
    assert g is not None
    g_den, g_s1, g_z1 = (None if t is None else as_laid(t) for t in (g_den, g_s1, g_z1))
    da, db, dv = torch.empty_like(a), torch.empty_like(b), torch.empty_like(v)
    d_decay = b.new_empty(b.shape[:3], dtype=torch.float32) if decay is not None and wanted[3] else None
    d_near = a.new_empty(a.shape[:3], dtype=torch.float32) if near is not None and wanted[4] else None
    d_s = torch.empty_like(s) if s is not None and wanted[5] else None
    d_z = torch.empty_like(z) if z is not None and wanted[6] else None
    pointers = (g_den, g_s1, g_z1, d_decay, d_near, d_s, d_z)
    gradients = (*rows(g), *rows(da), *rows(db), *rows(dv), *map(_address, pointers))
    kernel.library().linear_backward(_pack(inputs, fixed, results, gradients))
    if near is not None and d_near is not None:
        d_near = d_near.sum_to_size(near.shape)
    if decay is not None and d_decay is not None:
        d_decay = d_decay.sum_to_size(decay.shape)
    return [da, db, dv, d_decay, d_near, d_s, d_z]


def _pack(inputs: Inputs, fixed: Fixed, results: Inputs, gradients: tuple[int, ...]) -> bytes:
    a, b, v, decay, near, s, z = inputs
    out, den, s1, z1 = results
    assert a is not None and b is not None and v is not None
    assert out is not None and den is not None
    (batch, heads, queries, m), (_, kv, tokens, dv) = a.shape, v.shape
    return LINEAR.pack(
        DTYPES[v.dtype], torch.get_num_threads(), batch, heads, kv, queries, tokens, m, dv,
        0 if fixed.divide is None else _DIVIDE[fixed.divide.by], fixed.elu, fixed.ramp,
        0.0 if fixed.divide is None else fixed.divide.eps,
        *rows(a), *rows(b), *rows(v), *rows(out), den.data_ptr(), *_shared(decay), *_shared(near),
        *map(_address, (fixed.starts, s, z, s1, z1)), *gradients,
    )  # fmt: skip


def _shared(t: Tensor | None) -> tuple[int, ...]:
    """Address and strides of [1 or B, heads, 1 or T]; a stride is 0 where texts or tokens share a number."""
    if t is None:
        return _NO_ROWS
    return (t.data_ptr(), *(n if size > 1 else 0 for n, size in zip(t.stride(), t.shape, strict=True)))


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
