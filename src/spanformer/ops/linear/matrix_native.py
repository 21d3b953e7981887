"""The gated delta rule and gated linear attention by the compiled CPU kernel (csrc/delta.h, csrc/gla.h), as a torch
operator and as an autograd function. Without beta it is gated linear attention.

Shapes as in matrix_call.py; marks [B, Hkv, ceil(T / SEGMENT), D, Dv]: states from which the backward pass starts over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.backends.base import no_second_derivative, refuse_second_derivative, unserved_transforms
from spanformer.ops.c_layout import DELTA, GLA
from spanformer.ops.kernel import DTYPES, MAX_HEAD_SIZE, as_laid, rows
from spanformer.ops.linear.matrix_call import MatrixCall

kernel.problem()  # loads the library now, as backends/native.py
SEGMENT = 256  # tokens from one mark to the next, a multiple of the kernel's chunk of 32
COUNT = 6  # inputs with gradients: q, k, v, beta, decay, state
_NO_ROWS = (0, 0, 0, 0)


def refuses(call: MatrixCall) -> list[str]:
    """Why the kernel cannot serve a call; [] if it can."""
    if problem := kernel.problem():
        return [problem]
    reasons = unserved_transforms("the native kernel")
    if call.v.device.type != "cpu":
        reasons.append(f"v is on {call.v.device}; the native kernel runs on the CPU")
    if call.v.dtype not in DTYPES:
        reasons.append(f"v has dtype {call.v.dtype}; the native kernel takes float32 and bfloat16")
    if (size := max(call.k.shape[3], call.v.shape[3])) > MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {MAX_HEAD_SIZE}")
    return reasons


def run_native(call: MatrixCall) -> tuple[Tensor, Tensor]:
    inputs = (call.q, call.k, call.v, call.beta, call.decay, call.state)
    plain = not torch.compiler.is_compiling() and all(t is None or type(t) in _PLAIN for t in inputs)
    learning = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if not plain:
        out, state, _ = torch.ops.spanformer.matrix_state(*inputs, call.starts, learning)
        return out, state
    if learning:
        return _Matrix.apply(*inputs, call.starts)  # pyright: ignore[reportReturnType]
    return run_forward(laid(inputs), call.starts, False)[:2]


_PLAIN = (Tensor, torch.nn.Parameter)


class Around(NamedTuple):
    """A layer around the operation (see layer.py), as the kernel reads it; all None: the operation alone."""

    gate: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    weights: tuple[Tensor | None, ...] = (None, None, None)
    """[H or Hkv, conv, D or Dv]"""
    tails: tuple[Tensor | None, ...] = (None, None, None)
    padding: Tensor | None = None


ALONE = Around()


def _pack(
    inputs, starts: Tensor | None, out: Tensor | None, state: Tensor | None, marks: Tensor | None, grads, around: Around
) -> bytes:
    """grads: the last fields, from `g` on; a `Gla` has no beta and no gradient of it."""
    q, k, v, beta, decay, before = inputs
    (b, h, t, d), hkv, dv = q.shape, k.shape[1], v.shape[3]
    g, dq, dk, dv_, d_beta, d_decay, d_state, g_state, d_gate, d_norm, *d_weights = grads or (None,) * 13
    sizes = (DTYPES[q.dtype], torch.get_num_threads(), b, h, hkv, t, d, dv, SEGMENT)
    texts = (*rows(q), *rows(k), *rows(v), *_rows(out))
    after = (starts, before, state, marks)
    gradients = (*_rows(g), *_rows(dq), *_rows(dk), *_rows(dv_), *_rows(d_gate), _ptr(g_state))
    if beta is None:
        return GLA.struct.pack(
            *sizes, *texts, *map(_ptr, (decay, *after)), around.eps, *_rows(around.gate), _ptr(around.norm),
            *gradients, *map(_ptr, (d_decay, d_state, d_norm)),
        )  # fmt: skip
    conv = 0 if around.weights[0] is None else around.weights[0].shape[1]
    return DELTA.struct.pack(
        *sizes, *texts, *map(_ptr, (beta, decay, *after)), conv, around.eps,
        *map(_ptr, (*around.weights, *around.tails, around.padding)), *_rows(around.gate), _ptr(around.norm),
        *gradients, *map(_ptr, (d_beta, d_decay, d_state, *d_weights, d_norm)),
    )  # fmt: skip


def _rows(t: Tensor | None) -> tuple[int, int, int, int]:
    return _NO_ROWS if t is None else rows(t)


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def dense(t: Tensor) -> Tensor:
    """Rows of a head must be contiguous and apart; anything else is served in place."""
    return t if t.stride(3) == 1 and 1 not in t.stride()[:3] and not t.is_neg() else as_laid(t)


def laid(inputs):
    """As the kernel reads them."""
    q, k, v, *others = inputs
    return (*map(dense, (q, k, v)), *(None if t is None else as_laid(t.detach()) for t in others))


def _empty(inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Results and marks, not yet written."""
    q, k, v = inputs[:3]
    (b, hkv, t, d), dv = k.shape, v.shape[3]
    out = torch.empty_like(q) if d == dv else q.new_empty((*q.shape[:3], dv))
    state = q.new_empty((b, hkv, d, dv), dtype=torch.float32)
    return out, state, q.new_empty((b, hkv, -(-t // SEGMENT), d, dv), dtype=torch.float32)


def run_forward(
    inputs, starts: Tensor | None, learning: bool, around: Around = ALONE
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of inputs that are `laid`."""
    starts = None if starts is None else as_laid(starts)
    out, state, marks = _empty(inputs)
    marks = marks if learning else None
    library = kernel.library()
    run = library.gla_forward if inputs[3] is None else library.delta_forward
    run(_pack(inputs, starts, out, state, marks, None, around))
    return out, state, marks


def run_backward(
    g_out: Tensor | None,
    g_state: Tensor | None,
    marks: Tensor,
    inputs,
    starts: Tensor | None,
    around: Around = ALONE,
) -> list[Tensor | None]:
    """Gradients of the six inputs, and of gate, norm and the three weights; None for one that is None."""
    starts = None if starts is None else as_laid(starts)
    if g_out is None:
        g_out = torch.zeros_like(_empty(inputs)[0])
    g_out, g_state = dense(g_out), None if g_state is None else as_laid(g_state)
    made = [None if t is None else torch.empty_like(t) for t in inputs]
    b, h = inputs[0].shape[:2]
    gate = None if around.gate is None else torch.empty_like(around.gate)
    norm = None if around.norm is None else around.norm.new_empty((b, h, *around.norm.shape))
    weights = [None if w is None else w.new_empty((b, *w.shape)) for w in around.weights]  # a text's share each
    library = kernel.library()
    run = library.gla_backward if inputs[3] is None else library.delta_backward
    run(_pack(inputs, starts, None, None, marks, (g_out, *made, g_state, gate, norm, *weights), around))
    return [
        *made,
        gate,
        None if norm is None else norm.sum((0, 1)),
        *(None if w is None else w.sum(0) for w in weights),
    ]


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *inputs, starts = arguments
        out, state, marks = run_forward(laid(inputs), starts, True)
        ctx.save_for_backward(*inputs, starts, marks)
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    def backward(ctx, g_out, g_state):
        refuse_second_derivative("native")
        *inputs, starts, marks = ctx.saved_tensors
        found = run_backward(g_out, g_state, marks, laid(inputs), starts)
        return *(g if want else None for g, want in zip(found, ctx.needs_input_grad, strict=False)), None


# ---- the torch operator, for torch.compile and tensor subclasses

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? decay, Tensor? state, Tensor? starts"
torch.library.define("spanformer::matrix_state", f"({_INPUTS}, bool learning) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    "spanformer::matrix_state_backward", f"(Tensor? g_out, Tensor? g_state, Tensor marks, {_INPUTS}) -> Tensor[]"
)


@torch.library.impl("spanformer::matrix_state", "cpu")
def _matrix_cpu(*args):
    *inputs, starts, learning = args
    out, state, marks = run_forward(laid(inputs), starts, learning)
    return out, state, out.new_empty(0, dtype=torch.float32) if marks is None else marks


@torch.library.register_fake("spanformer::matrix_state")
def _matrix_fake(*args):
    out, state, marks = _empty((dense(args[0]), *args[1:3]))
    return out, state, marks if args[-1] else out.new_empty(0, dtype=torch.float32)


@torch.library.impl("spanformer::matrix_state_backward", "cpu")
def _matrix_backward_cpu(g_out, g_state, marks, *args):
    found = run_backward(g_out, g_state, marks, laid(args[:COUNT]), args[COUNT])[:COUNT]
    return [marks.new_empty(0) if g is None else g.contiguous() for g in found]


@torch.library.register_fake("spanformer::matrix_state_backward")
def _matrix_backward_fake(g_out, g_state, marks, *args):
    return [marks.new_empty(0) if t is None else t.new_empty(t.shape) for t in args[:COUNT]]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[: COUNT + 1], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _operator_backward(ctx, g_out, g_state, _g_marks):
    *inputs, starts, marks = ctx.saved_tensors
    found = torch.ops.spanformer.matrix_state_backward(g_out, g_state, marks, *inputs, starts)
    return *(g if want else None for g, want in zip(found, ctx.needs_input_grad, strict=False)), None, None


torch.library.register_autograd("spanformer::matrix_state", _operator_backward, setup_context=_setup_context)
torch.library.register_autograd("spanformer::matrix_state_backward", lambda ctx, grads: no_second_derivative("native"))
