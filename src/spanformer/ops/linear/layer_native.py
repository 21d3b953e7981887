"""`run_layer` by the compiled kernel, with autograd: the backward pass computes everything again from its inputs.

Shapes as in layer.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backends.base import refuse_second_derivative
from spanformer.ops.kernel import as_laid
from spanformer.ops.linear.layer import Layer
from spanformer.ops.linear.matrix_call import MatrixCall
from spanformer.ops.linear.matrix_native import COUNT, Around, dense, laid, run_backward, run_forward


class Fixed(NamedTuple):
    """What has no gradient."""

    starts: Tensor | None
    tails: tuple[Tensor | None, ...]
    padding: Tensor | None
    eps: float


def run_native(call: MatrixCall, layer: Layer) -> tuple[Tensor, Tensor]:
    weights, tails, padding = layer.convolution or ((None,) * 3, None, None)
    turned = (None if w is None else w.float().transpose(1, 2) for w in weights)  # [heads, conv, size]
    fixed = Fixed(call.starts, tails or (None,) * 3, padding, layer.eps)
    inputs = (call.q, call.k, call.v, call.beta, call.decay, call.state, layer.gate, layer.norm.float(), *turned)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _Layer.apply(*inputs, fixed)  # pyright: ignore[reportReturnType]
    of, around = _laid(inputs, fixed)
    return run_forward(of, fixed.starts, False, around)[:2]


def _laid(inputs, fixed: Fixed):
    """The operation's own inputs, and what is around them, as the kernel reads them."""
    gate, *learned = inputs[COUNT:]
    learned = [None if t is None else as_laid(t.detach()) for t in learned]
    tails = [None if t is None else as_laid(t) for t in fixed.tails]
    padding = None if fixed.padding is None else as_laid(fixed.padding)
    around = Around(dense(gate), learned[0], fixed.eps, tuple(learned[1:]), tuple(tails), padding)
    return laid(inputs[:COUNT]), around


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *inputs, fixed = arguments
        of, around = _laid(inputs, fixed)
        out, state, marks = run_forward(of, fixed.starts, True, around)
        ctx.save_for_backward(*inputs, fixed.starts, *fixed.tails, fixed.padding, marks)
        ctx.eps = fixed.eps
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    def backward(ctx, g_out, g_state):
        refuse_second_derivative("native")
        *inputs, starts, tail_q, tail_k, tail_v, padding, marks = ctx.saved_tensors
        of, around = _laid(inputs, Fixed(starts, (tail_q, tail_k, tail_v), padding, ctx.eps))
        found = run_backward(g_out, g_state, marks, of, starts, around)
        return *(g if want else None for g, want in zip(found, ctx.needs_input_grad, strict=False)), None
