"""Linear attention over a long text whose features are not stored: they are made a segment at a time, and made again in
the backward pass. Without it a layer holds 2·m numbers a token and head for φ, and as many for its gradient.

Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D and Dv head sizes, m features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spanformer.ops import Attended, Divide, LinearState
from spanformer.ops.backends.base import refuse_second_derivative, unserved_transforms

if TYPE_CHECKING:
    from spanformer.attention.recurrent import RecurrentAttention

Tensors = dict[str, Tensor]
SEGMENT = 1024
"""tokens, whole chunks of the kernel"""
LONG = 4096
"""tokens; shorter texts keep their features, since making them again costs a quarter of the time"""
TYPES = (Tensor, torch.nn.Parameter)


class Names(NamedTuple):
    """Of the tensors that an autograd function takes one by one."""

    inputs: tuple[str, ...]
    learned: tuple[str, ...]
    buffers: tuple[str, ...]

    def split(self, tensors: tuple[Tensor, ...]) -> Iterator[Tensors]:
        at = 0
        for names in self:
            yield dict(zip(names, tensors[at : at + len(names)], strict=True))
            at += len(names)


def serves(mechanism: RecurrentAttention, q: Tensor, inputs: Tensors) -> bool:
    """Whether features of these tokens should be, and can be, made again."""
    if not torch.is_grad_enabled() or q.shape[2] <= LONG or mechanism.backend not in ("auto", "native"):
        return False
    tensors = (q, *inputs.values(), *mechanism.parameters(recurse=False))
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16) or torch.compiler.is_compiling():
        return False
    if any(type(t) not in TYPES for t in tensors) or not any(t.requires_grad for t in tensors):
        return False
    from spanformer.ops.linear.native import unusable  # lazily: it loads the library

    return not (unserved_transforms("the native kernel") or unusable())


def attend_again(
    mechanism: RecurrentAttention, q: Tensor, inputs: Tensors, state: Tensors, divide: Divide
) -> tuple[Attended, LinearState, Tensor | None]:
    """As `RecurrentAttention.run` for a text of one document without padding: out and lse, the state after it, and the
    keys' last peak [B, Hkv]."""
    from spanformer.ops.linear.native import lse_of

    learned, buffers = dict(mechanism.named_parameters(recurse=False)), dict(mechanism.named_buffers(recurse=False))
    names = Names(tuple(inputs), tuple(learned), tuple(buffers))
    given = (*inputs.values(), *learned.values(), *buffers.values())
    out, den, s, z, peaks, peak = _Again.apply(
        mechanism, names, divide, q, state["s"], state["z"], state.get("peak"), *given
    )
    lse = lse_of(divide, den)
    return Attended(out, lse if peaks is None else lse + peaks), LinearState(s, z), peak


class Piece(NamedTuple):
    """Features of one segment, and what they are made of."""

    a: Tensor
    b: Tensor
    decay: Tensor | None
    v: Tensor
    peaks: Tensor | None
    """[B, H, T]: of queries and keys together"""
    last: Tensor | None
    """[B, Hkv]"""


def _piece(mechanism: Any, q: Tensor, inputs: Tensors, peak: Tensor | None) -> Piece:
    a, query_peak = mechanism.query_features(q)
    keys = mechanism.key_features(inputs, {} if peak is None else {"peak": peak}, None, None)
    peaks = query_peak
    if keys.peak is not None:
        peaks = query_peak + keys.peak.repeat_interleave(mechanism.heads // mechanism.kv_heads, 1)
    last = None if keys.peak is None else keys.peak[:, :, -1]
    decay = None if keys.decay is None else keys.decay.float()
    return Piece(a, keys.b, decay, inputs["v"].to(a.dtype), peaks, last)


def _twin(mechanism: Any, learned: Tensors, buffers: Tensors) -> Any:
    """The mechanism with these parameters: its own may have been exchanged since (torch.func.functional_call)."""
    twin = copy.copy(mechanism)
    twin.__dict__["_parameters"], twin.__dict__["_buffers"] = learned, buffers
    return twin


def _pieces(tokens: int) -> list[slice]:
    return [slice(at, min(at + SEGMENT, tokens)) for at in range(0, tokens, SEGMENT)]


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mechanism, names: Names, divide: Divide, q, s, z, peak, *given):
        from spanformer.ops.linear.native import Fixed, laid, run_forward

        inputs, fixed = next(names.split(given)), Fixed(None, 0.0, divide, False)
        out, den = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        states, peaks = [(s, z, peak)], []
        for at in _pieces(q.shape[2]):
            piece = _piece(mechanism, q[:, :, at], {name: t[:, :, at] for name, t in inputs.items()}, peak)
            found, den[:, :, at], s, z = run_forward(laid((piece.a, piece.b, piece.v, piece.decay, None, s, z)), fixed)
            out[:, :, at], peak = found, piece.last
            states.append((s, z, peak))
            peaks.append(piece.peaks)
        ctx.save_for_backward(q, out, den, *given, *(t for each in states for t in each))
        ctx.mechanism, ctx.names, ctx.divide = mechanism, names, divide
        ctx.set_materialize_grads(False)
        every = None if peaks[0] is None else torch.cat(peaks, 2)
        ctx.mark_non_differentiable(*(t for t in (every, peak) if t is not None))
        return out, den, s, z, every, peak

    @staticmethod
    def backward(ctx, g_out, g_den, g_s, g_z, *_):
        from spanformer.ops.linear.native import Fixed

        refuse_second_derivative("native")
        (q, out, den, *rest), fixed = ctx.saved_tensors, Fixed(None, 0.0, ctx.divide, False)
        count = sum(map(len, ctx.names))
        inputs, learned, buffers = ctx.names.split(tuple(rest[:count]))
        states = list(zip(*[iter(rest[count:])] * 3, strict=True))
        learned = {name: t.detach().requires_grad_() for name, t in learned.items()}
        work = _Backward(_twin(ctx.mechanism, learned, buffers), {"q": q} | inputs, list(learned.values()), fixed)
        for n, at in reversed(list(enumerate(_pieces(q.shape[2])))):
            results = (out[:, :, at], den[:, :, at], *states[n + 1][:2])
            g_s, g_z = work.segment(at, states[n], results, (g_out, g_den, g_s, g_z))
        texts = (work.found[name] for name in ctx.names.inputs)
        return None, None, None, work.found["q"], g_s, g_z, None, *texts, *work.sums, *(None,) * len(ctx.names.buffers)


class _Backward:
    """Gradients of the texts and of what is learned, segment after segment."""

    def __init__(self, mechanism: Any, texts: Tensors, learned: list[Tensor], fixed: Any) -> None:
        self.mechanism, self.texts, self.learned, self.fixed = mechanism, texts, learned, fixed
        self.found = {name: torch.empty_like(t) for name, t in texts.items()}
        self.sums = [torch.zeros_like(t) for t in learned]

    def segment(self, at: slice, before, results, grads):
        """before: the state and the peak; results and their gradients as the kernel's, of the whole text. Returns the
        gradients of the state. All that a segment needs is gone when this returns."""
        from spanformer.ops.linear.native import laid, run_backward

        leaves = {name: t[:, :, at].detach().requires_grad_() for name, t in self.texts.items() if name != "v"}
        with torch.enable_grad():
            given = {name: leaves.get(name, t[:, :, at]) for name, t in self.texts.items() if name != "q"}
            piece = _piece(self.mechanism, leaves["q"], given, before[2])
        made = [t for t in (piece.a, piece.b, piece.decay) if t is not None and t.requires_grad]
        wanted = (True,) * 3 + (len(made) == 3, False, True, True)
        out, den, *after = results
        g_out, g_den = (None if g is None else g[:, :, at].to(piece.a.dtype) for g in grads[:2])
        tensors = laid((piece.a, piece.b, piece.v, piece.decay, None, *before[:2]))
        da, db, dv, d_decay, _, g_s, g_z = run_backward(
            tuple(None if t is None else t.detach() for t in tensors), self.fixed,
            (out.to(piece.a.dtype), den.contiguous(), *after), (g_out, g_den, *grads[2:]), wanted,
        )  # fmt: skip
        assert dv is not None
        self.found["v"][:, :, at] = dv
        toward = [g for g in (da, db, d_decay) if g is not None]
        each = torch.autograd.grad(made, [*leaves.values(), *self.learned], toward, allow_unused=True)
        for name, grad in zip(leaves, each[: len(leaves)], strict=True):
            self.found[name][:, :, at] = 0 if grad is None else grad
        self.sums = [a if b is None else a + b for a, b in zip(self.sums, each[len(leaves) :], strict=True)]
        return g_s, g_z
