"""What a backend is: a name, whether it can run here, whether it can serve a call, and the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from spanformer.ops.call import Attended, Call
from spanformer.ops.rule import Rule


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


def unserved_terms(name: str, *more: str) -> Callable[[Rule], list[str]]:
    """A function that says which of a rule's terms are neither in PLAIN_TERMS nor among `more`: a term that is new to a
    backend is refused, not ignored. (`kept` and `distance_value` are served before a backend sees a rule.)"""
    others = [(f.name, f.default) for f in fields(Rule) if f.name not in (*PLAIN_TERMS, *more)]

    def reasons(rule: Rule) -> list[str]:
        used = [term for term, unset in others if (t := getattr(rule, term)) is not unset and t != unset]
        return [f"{term} is not served by {name}" for term in used]

    return reasons


def refuse_second_derivative(name: str) -> None:
    """For a hand-written backward: under create_graph=True its result would pass for a constant, silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backend {name!r} has no second derivative (create_graph=True); backend='reference' has, at dense cost"
        )
