"""A backend: its name, whether it can run here, whether it can serve a call, and the run itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from spanformer.ops.attended import Attended
from spanformer.ops.lower import Lowered
from spanformer.ops.lower.call import Inputs


@dataclass(frozen=True)
class Backend:
    name: str
    unusable: Callable[[], list[str]]
    """why it cannot run on this machine; [] if it can"""
    refuses: Callable[[Lowered], list[str]]
    """why it cannot serve this call; [] if it can"""
    run: Callable[[Lowered], Attended]
    part_gradients: Callable[[Lowered, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor | None]] | None = (
        None
    )
    """as `ops.attend.part_gradients`, if it has them"""


COMMON = (
    *(f.name for f in fields(Inputs)), "causal", "shift", "max_future", "ramp", "reach", "span", "distance_bias",
    "distance_vec", "key_bias", "sink_logits", "blocks",
)  # fmt: skip
"""what every backend serves"""
LEARNED = (
    "span", "distance_bias", "distance_vec", "distance_scale", "key_bias", "key_span", "sink_logits",
)  # fmt: skip


def unserved_terms(holder: type, name: str, served: Iterable[str]) -> Callable[[Any], list[str]]:
    """A function that lists the terms of a `holder` (a dataclass) that are used and not `served`, so that a backend
    refuses a new term instead of ignoring it."""
    others = [(f.name, f.default) for f in fields(holder) if f.name not in set(served)]

    def reasons(held: Any) -> list[str]:
        used = [term for term, unset in others if (t := getattr(held, term)) is not unset and t != unset]
        return [f"{name} does not support {term}" for term in used]

    return reasons


def unserved_derivatives(name: str, call: Lowered) -> list[str]:
    """Why a backend whose only derivative is a hand-written backward pass cannot serve what torch is about to do
    with a call."""
    reasons = unserved_transforms(name)
    if reasons or forward_ad._current_level < 0:
        return reasons
    tensors = (call.q, call.k, call.v, *(getattr(call, term) for term in LEARNED))
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return [f"{name} has no forward-mode derivatives; backend='reference' has them, at dense cost"]
    return []


def unserved_transforms(name: str) -> list[str]:
    if torch._C._functorch.maybe_current_level() is None:  # pyright: ignore[reportAttributeAccessIssue]
        return []
    return [f"{name} does not support torch.func (grad, vmap, jvp …); use torch.autograd, or backend='reference'"]


def refuse_second_derivative(name: str) -> None:
    """For a hand-written backward: with create_graph=True its result would count as a constant, silently wrong."""
    if torch.is_grad_enabled():
        no_second_derivative(name)


def no_second_derivative(name: str) -> NoReturn:
    raise RuntimeError(
        f"backend {name!r} has no second derivative (create_graph=True); backend='reference' has one, at dense cost"
    )


# ---- what hand-written operators share


def fold_by_key(grad: Tensor, term: Tensor) -> Tensor:
    """[B, H, Tk] summed over the axes that a term of keys, [1 or B, 1 or H or fewer, Tk], broadcasts."""
    b, h, tk = grad.shape
    if term.shape[1] < h:
        grad = grad.view(b, term.shape[1], h // term.shape[1], tk).sum(2 if len(term) == b else (0, 2))
    elif len(term) < b:
        grad = grad.sum(0)
    return grad.view(term.shape)


def save_call(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor], count: int) -> None:
    """The `setup_context` of an operator whose first `count` inputs have gradients. Other tensors are saved too, so
    that autograd refuses a backward pass after an in-place change of them."""
    ctx.save_for_backward(*inputs[:count], *output, *(t for t in inputs[count:] if isinstance(t, Tensor)))
    ctx.fixed = [None if isinstance(t, Tensor) else t for t in inputs[count:]]
    ctx.are_tensors = [isinstance(t, Tensor) for t in inputs[count:]]
    ctx.set_materialize_grads(False)


def saved_call(ctx: Any, count: int) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor], list]:
    """(inputs with gradients, the operator's two results, its other inputs), as `save_call` was given them."""
    saved = ctx.saved_tensors
    tensors = iter(saved[count + 2 :])
    fixed = [next(tensors) if is_tensor else t for t, is_tensor in zip(ctx.fixed, ctx.are_tensors, strict=True)]
    return saved[:count], saved[count : count + 2], fixed
