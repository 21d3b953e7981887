"""What a backend is: a name, whether it can run here, whether it can serve a call, and the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NoReturn

import torch
from torch.autograd import forward_ad

from spanformer.ops.call import Attended, Call
from spanformer.ops.rule import Rule
from spanformer.ops.rule_checks import KEY_TERMS
from spanformer.ops.tables import TABLES


@dataclass(frozen=True)
class Backend:
    name: str
    unusable: Callable[[], list[str]]
    """why it cannot run on this machine; [] if it can"""
    refuses: Callable[[Call], list[str]]
    """why it cannot serve this call; [] if it can"""
    run: Callable[[Call], Attended]


PLAIN_TERMS = (
    "heads", "causal", "reach", "span", "ramp", "distance_bias", "distance_vec", "key_bias", "documents", "sinks",
    "blocks", "penalty", "original",
)  # fmt: skip
"""what every backend serves"""
LEARNED = ("span", *TABLES, *KEY_TERMS, "sinks")


def unserved_terms(name: str, *more: str) -> Callable[[Rule], list[str]]:
    """A function that says which of a rule's terms are neither in PLAIN_TERMS nor among `more`: a term that is new to a
    backend is refused, not ignored. (`kept` and `distance_value` are served before a backend sees a rule.)"""
    others = [(f.name, f.default) for f in fields(Rule) if f.name not in (*PLAIN_TERMS, *more)]

    def reasons(rule: Rule) -> list[str]:
        used = [term for term, unset in others if (t := getattr(rule, term)) is not unset and t != unset]
        return [f"{term} is not served by {name}" for term in used]

    return reasons


def unserved_derivatives(name: str, call: Call) -> list[str]:
    """Why a backend with a hand-written backward pass, and nothing but that, cannot serve what torch is about to do
    with a call."""
    reasons = unserved_transforms(name)
    if reasons or forward_ad._current_level < 0:
        return reasons
    tensors = (call.q, call.k, call.v, *(getattr(call.rule, term) for term in LEARNED))
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return [f"{name} has no forward-mode derivatives; backend='reference' has, at dense cost"]
    return []


def unserved_transforms(name: str) -> list[str]:
    if torch._C._functorch.maybe_current_level() is None:  # pyright: ignore[reportAttributeAccessIssue]
        return []
    return [f"{name} does not support torch.func (grad, vmap, jvp …); use torch.autograd, or backend='reference'"]


def refuse_second_derivative(name: str) -> None:
    """For a hand-written backward: under create_graph=True its result would pass for a constant, silently wrong."""
    if torch.is_grad_enabled():
        no_second_derivative(name)


def no_second_derivative(name: str) -> NoReturn:
    raise RuntimeError(
        f"backend {name!r} has no second derivative (create_graph=True); backend='reference' has, at dense cost"
    )
