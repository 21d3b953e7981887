"""The native CPU backend: the compiled kernel as a torch operator, with its fake and autograd.

Calls reach the same two functions in one of two ways: `torch.ops.spanformer.attend` where torch traces (torch.compile,
fake tensors, tensor subclasses), and a plain autograd function in eager mode, which costs less per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import (
    COMMON,
    Backend,
    fold_by_key,
    no_second_derivative,
    refuse_second_derivative,
    save_call,
    saved_call,
    unserved_derivatives,
    unserved_terms,
)
from spanformer.ops.kernel import Fixed, Terms, as_float, as_laid, run_backward, run_forward
from spanformer.ops.lower import Lowered

# Load the library now, because torch.compile cannot trace that, and before an operator is registered: this raises if an
# environment variable names a missing library, and the next import starts again.
kernel.problem()


def attend_native(call: Lowered) -> Attended:
    inputs = (call.q, call.k, call.v, *_learned(call))
    fixed = _fixed(call)
    learning = plain = not torch.compiler.is_compiling()
    if plain:
        learning = False
        for t in inputs:
            if t is not None:
                plain = plain and type(t) in _PLAIN
                learning = learning or t.requires_grad
    if not plain:
        return Attended(*torch.ops.spanformer.attend(*inputs, *fixed))
    if learning and torch.is_grad_enabled():
        return Attended(*_Attend.apply(*inputs, fixed))
    return Attended(*_forward(inputs, fixed))


_PLAIN = (Tensor, torch.nn.Parameter)
COUNT = 3 + len(Terms._fields)  # inputs with gradients: q, k, v and the learned terms


def _learned(call: Lowered) -> Terms:
    return Terms(call.span, call.distance_bias, call.distance_vec, call.key_bias, call.sink_logits, call.key_span)


def _fixed(call: Lowered) -> Fixed:
    blocks = call.blocks
    reach = call.reach
    assert reach is None or isinstance(reach, Tensor)
    pattern = (None, None, None, None) if blocks is None else blocks.tensors()
    return Fixed(
        call.scale, call.ramp, call.dropout, call.causal, call.shift, call.max_future, reach, call.seed,
        call.q_positions, call.k_positions, call.q_documents, call.k_documents, *(call.orders or (None, None)),
        0 if blocks is None else blocks.size, *pattern, *(call.numbers or (None, None, None)),
    )  # fmt: skip


def _forward(inputs, fixed: Fixed) -> tuple[Tensor, Tensor]:
    """inputs: q, k, v and the six learned terms, in the order of `Terms`."""
    q, k, v, *learned = inputs
    terms = Terms(*map(as_float, learned))
    return run_forward(_dense(q), _dense(k), _dense(v), terms, _laid(fixed))


def _backward(g_out, g_lse, out, lse, inputs, fixed: Fixed, wanted) -> list[Tensor | None]:
    """Gradients of the nine inputs, each in the input's shape and dtype; None where not wanted."""
    q, k, v, *learned = inputs
    terms = Terms(*map(as_float, learned))
    g_out = torch.zeros_like(out) if g_out is None else _dense(g_out)
    g_lse = None if g_lse is None else as_laid(g_lse)
    grads = list(run_backward(_dense(q), _dense(k), _dense(v), out, lse, g_out, g_lse, terms, _laid(fixed), wanted[3:]))
    for n in (3, 5):  # key_bias and key_span
        if (grad := grads[3 + n]) is not None:
            grads[3 + n] = fold_by_key(grad, learned[n])
    pairs = zip(grads, inputs, wanted, strict=True)
    return [g if g is None or not want or g.dtype == t.dtype else g.to(t.dtype) for g, t, want in pairs]


def _part_gradients(call: Lowered, g_out: Tensor, lse: Tensor, spread: Tensor):
    """The kernel takes g_lse − g_out·out itself, so an output of zeros leaves `spread` as it is."""
    out = g_out.new_zeros(g_out.shape[3]).expand(g_out.shape)
    wanted = (True, True, True, call.span is not None, *[False] * (COUNT - 4))
    inputs = (call.q, call.k, call.v, *_learned(call))
    dq, dk, dv, d_span, *_ = _backward(g_out, as_laid(spread), out, as_laid(lse), inputs, _fixed(call), wanted)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, d_span


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *inputs, fixed = arguments
        out, lse = _forward(inputs, fixed)
        # `fixed` too, so that autograd refuses a backward pass after an in-place change of its tensors
        ctx.save_for_backward(*inputs, out, lse, fixed.reach, *fixed.ids())
        ctx.fixed = fixed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, g_out, g_lse):
        refuse_second_derivative("native")
        *inputs, out, lse = ctx.saved_tensors[: COUNT + 2]
        return *_backward(g_out, g_lse, out, lse, inputs, ctx.fixed, ctx.needs_input_grad[:COUNT]), None


# ---- the torch operator

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? span, Tensor? bias, Tensor? vec, Tensor? key, Tensor? sink_logits, "
    "Tensor? key_span"
)
_FIXED = (
    "float scale, float ramp, float dropout, bool causal, int shift, int max_future, Tensor? reach, Tensor? seed, "
    "Tensor? q_positions, Tensor? k_positions, Tensor? q_documents, Tensor? k_documents, "
    "Tensor? q_orders, Tensor? k_orders, "
    "int block_size, Tensor? block_offsets, Tensor? block_columns, Tensor? block_mask_ids, Tensor? block_masks, "
    "Tensor? drop_heads, Tensor? drop_queries, Tensor? drop_keys"
)
torch.library.define("spanformer::attend", f"({_INPUTS}, {_FIXED}) -> (Tensor, Tensor)")
torch.library.define(
    "spanformer::attend_backward",
    f"(Tensor g_out, Tensor g_lse, Tensor out, Tensor lse, {_INPUTS}, {_FIXED}, bool[] wanted) -> Tensor[]",
)


@torch.library.impl("spanformer::attend", "cpu")
def _attend_cpu(*args):
    return _forward(args[:COUNT], Fixed(*args[COUNT:]))


@torch.library.register_fake("spanformer::attend")
def _attend_fake(q, k, v, *_rest):
    (b, h, tq, d), dv = q.shape, v.shape[3]
    q = _dense(q)
    out = torch.empty_like(q) if d == dv else q.new_empty((b, h, tq, dv))
    return out, q.new_empty((b, h, tq), dtype=torch.float32)


@torch.library.impl("spanformer::attend_backward", "cpu")
def _attend_backward_cpu(g_out, g_lse, out, lse, *args):
    *rest, wanted = args
    grads = _backward(g_out, g_lse, out, lse, rest[:COUNT], Fixed(*rest[COUNT:]), wanted)
    # an operator cannot return None: an empty tensor stands for an unwanted gradient
    return [g.contiguous() if g is not None else out.new_empty(0) for g in grads]


@torch.library.register_fake("spanformer::attend_backward")
def _attend_backward_fake(g_out, g_lse, out, lse, *args):
    *rest, wanted = args
    pairs = zip(rest[:COUNT], wanted, strict=True)
    return [t.new_empty(t.shape) if t is not None and want else out.new_empty(0) for t, want in pairs]


def _saved(ctx, inputs, output):
    save_call(ctx, inputs, output, COUNT)


def _operator_backward(ctx, g_out, g_lse):
    inputs, (out, lse), fixed = saved_call(ctx, COUNT)
    wanted = [bool(want) and t is not None for want, t in zip(ctx.needs_input_grad[:COUNT], inputs, strict=True)]
    g_out = torch.zeros_like(out) if g_out is None else g_out
    g_lse = torch.zeros_like(lse) if g_lse is None else g_lse
    grads = torch.ops.spanformer.attend_backward(g_out, g_lse, out, lse, *inputs, *fixed, wanted)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), *([None] * len(fixed))


torch.library.register_autograd("spanformer::attend", _operator_backward, setup_context=_saved)
torch.library.register_autograd("spanformer::attend_backward", lambda ctx, grads: no_second_derivative("native"))


# ---- layouts that the kernel takes


def _dense(t: Tensor) -> Tensor:
    """Rows of a head must be contiguous; other strides need no copy. Overlapping rows (unfold) are copied: a tensor
    made like them may have another axis order."""
    return t if t.stride(3) == 1 and 1 not in t.stride()[:3] and not t.is_neg() else as_laid(t)


def _laid(fixed: Fixed) -> Fixed:
    """Its tensors, contiguous; most calls have none."""
    ids = fixed.ids()
    for t in ids:
        if t is not None:
            return fixed.with_ids([None if t is None else as_laid(t) for t in ids])
    return fixed


_unserved = unserved_terms(Lowered, "the native kernel", (*COMMON, "key_span", "orders"))


def _refuses(call: Lowered) -> list[str]:
    reasons = [*_unserved(call), *unserved_derivatives("the native kernel", call)]
    if call.q.device.type != "cpu":
        reasons.append(f"q is on {call.q.device}; the native kernel runs on the CPU")
    if call.q.dtype not in kernel.DTYPES:
        reasons.append(f"q has dtype {call.q.dtype}; the native kernel takes float32 and bfloat16")
    size = max(call.q.shape[3], call.v.shape[3])
    if size > kernel.MAX_HEAD_SIZE:
        reasons.append(f"the head size is {size}; the native kernel takes up to {kernel.MAX_HEAD_SIZE}")
    return reasons


def _unusable() -> list[str]:
    problem = kernel.problem()
    return [problem] if problem else []


BACKEND = Backend("native", _unusable, _refuses, attend_native, _part_gradients)
