"""The kernels as torch operators, with their fakes and autograd: `spanformer::attend_triton` and its backward. Nothing
here imports triton: that happens in the first launch, so a graph can be traced without it.

Shapes: B batch, H query heads, Tq queries, Dv head size of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import no_second_derivative, save_call, saved_call
from spanformer.ops.backends.triton.gradients import Gradients, run_backward, split_rows
from spanformer.ops.backends.triton.launch import Fixed, Terms, laid, output, prepare, run_forward
from spanformer.ops.lower import Lowered

COUNT = 3 + len(Terms._fields)
"""inputs with gradients: q, k, v and the learned terms"""
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? span, Tensor? bias, Tensor? key_bias, Tensor? sink_logits"
_FIXED = (
    "float scale, float ramp, bool causal, int shift, int max_future, Tensor? reach, Tensor? q_positions, "
    "Tensor? k_positions, Tensor? q_documents, Tensor? k_documents"
)
torch.library.define("spanformer::attend_triton", f"({_INPUTS}, {_FIXED}) -> (Tensor, Tensor)")
torch.library.define(
    "spanformer::attend_triton_backward",
    f"(Tensor g_out, Tensor? g_lse, Tensor? out, Tensor lse, {_INPUTS}, {_FIXED}, bool[] wanted) -> Tensor[]",
)


def attend_triton(call: Lowered) -> Attended:
    return Attended(*torch.ops.spanformer.attend_triton(call.q, call.k, call.v, *terms_of(call), *fixed_of(call)))


def part_gradients(call: Lowered, g_out: Tensor, lse: Tensor, spread: Tensor):
    """As `ops.attend.part_gradients`: `spread` is g_lse − g_out·out already."""
    inputs = (call.q, call.k, call.v, *terms_of(call))
    wanted = [True] * 4 + [False] * (COUNT - 4)
    found = torch.ops.spanformer.attend_triton_backward(g_out, spread, None, lse, *inputs, *fixed_of(call), wanted)
    dq, dk, dv, dspan, *_ = _of_inputs(found, inputs, wanted)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, dspan


def terms_of(call: Lowered) -> Terms:
    return Terms(call.span, call.distance_bias, call.key_bias, call.sink_logits)


def fixed_of(call: Lowered) -> Fixed:
    return Fixed(
        call.scale, call.ramp, call.causal, call.shift, call.max_future, call.reach, call.q_positions,
        call.k_positions, call.q_documents, call.k_documents,
    )  # fmt: skip


def _prepared(args):
    q, k, v, *terms = args[:COUNT]
    return prepare(q, k, v, Terms(*terms), Fixed(*args[COUNT:]))


def forward(*args):
    return run_forward(_prepared(args))


torch.library.impl("spanformer::attend_triton", "default", forward)


@torch.library.register_fake("spanformer::attend_triton")
def _attend_fake(q, k, v, *_rest):
    out = output(laid(q), v)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def backward(g_out, g_lse, out, lse, *args):
    *args, wanted = args
    found = run_backward(_prepared(args), out, lse, g_out, g_lse, wanted)
    # an operator cannot return None: an empty tensor stands for an unwanted gradient
    return [lse.new_empty(0) if t is None else t for t in found]


torch.library.impl("spanformer::attend_triton_backward", "default", backward)


@torch.library.register_fake("spanformer::attend_triton_backward")
def _backward_fake(g_out, g_lse, out, lse, *args):
    q, k, v, span, bias, key_bias, sink_logits = args[:COUNT]
    *_, wanted = args
    none = lse.new_empty(0)
    keys = wanted[1] or wanted[2] or wanted[5]
    count = sum(t is not None for t in (span, sink_logits))
    dynamic = span is not None and span.ndim == 3
    rows = lse.new_empty((count, *lse.shape) if dynamic else (count, lse.shape[1])) if count else none
    return [
        output(laid(q), q),
        output(laid(k), k) if keys else none,
        output(laid(v), v) if keys else none,
        lse.new_empty(bias.shape) if wanted[4] else none,
        lse.new_empty(key_bias.shape) if wanted[5] else none,
        rows,
    ]


def _of_inputs(found, inputs, wanted) -> list[Tensor | None]:
    """The gradient of each input in its dtype, None where not wanted."""
    made = Gradients(*found)
    dspan, dsink = split_rows(made.rows, Terms(*inputs[3:]))
    every = made.q, made.k, made.v, dspan, made.bias, made.key_bias, dsink
    return [g.to(t.dtype) if w and g is not None else None for g, t, w in zip(every, inputs, wanted, strict=True)]


def _saved(ctx, inputs, output):
    save_call(ctx, inputs, output, COUNT)


def _operator_backward(ctx, g_out, g_lse):
    inputs, (out, lse), fixed = saved_call(ctx, COUNT)
    wanted = [bool(want) and t is not None for want, t in zip(ctx.needs_input_grad[:COUNT], inputs, strict=True)]
    g_out = torch.zeros_like(out) if g_out is None else g_out
    found = torch.ops.spanformer.attend_triton_backward(g_out, g_lse, out, lse, *inputs, *fixed, wanted)
    return *_of_inputs(found, inputs, wanted), *([None] * len(fixed))


torch.library.register_autograd("spanformer::attend_triton", _operator_backward, setup_context=_saved)
torch.library.register_autograd("spanformer::attend_triton_backward", lambda ctx, grads: no_second_derivative("triton"))
