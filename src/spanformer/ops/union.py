"""Pairs that any of several rules shows, in one softmax: a window and every 64th key beyond it, for example.

    Union(Rule(8, reach=65), Rule(8, stride=64, skip=65))

Each rule keeps its own terms. No two rules may show the same pair: it would be counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spanformer.ops.rule import Rule

SHARED: dict[str, Any] = {"sink_tokens": 0, "sink_logits": None, "distance_value": None}
"""terms of the whole softmax and its output: the first rule has them for all, the others have these values"""


@dataclass(frozen=True, eq=False, init=False)
class Union:
    """The pairs of all its rules together. `sink_tokens`, `sink_logits` and `distance_value` belong in the first rule
    and apply to all pairs; `+` adds to every rule."""

    rules: tuple[Rule, ...]
    """two or more, with the same heads, causal and paper_compat"""

    def __init__(self, first: Rule | Union, second: Rule | Union, *more: Rule | Union) -> None:
        given = (first, second, *more)
        for rule in given:
            if not isinstance(rule, Rule | Union):
                raise ValueError(f"a Union was given a {type(rule).__name__}; expected a Rule or a Union")
        object.__setattr__(self, "rules", tuple(leaf for rule in given for leaf in rule.leaves()))
        for rule in self.rules[1:]:
            for name in ("heads", "causal", "paper_compat"):
                if getattr(rule, name) != getattr(self.rules[0], name):
                    raise ValueError(
                        f"a Union was given rules with {name} = {getattr(self.rules[0], name)} and "
                        f"{getattr(rule, name)}; expected one value"
                    )
            for name, unset in SHARED.items():
                if getattr(rule, name) is not unset and getattr(rule, name) != unset:
                    raise ValueError(
                        f"a Union was given {name} in its second rule or a later one; it applies to all pairs, so give "
                        "it to the first"
                    )

    @property
    def heads(self) -> int:
        return self.rules[0].heads

    @property
    def causal(self) -> bool:
        return self.rules[0].causal

    @property
    def paper_compat(self) -> bool:
        return self.rules[0].paper_compat

    @property
    def dynamic(self) -> bool:
        return any(rule.dynamic for rule in self.rules)

    def leaves(self) -> tuple[Rule, ...]:
        return self.rules

    def parts(self) -> list[tuple[list[int], Rule | Union]]:
        return [(list(range(self.heads)), self)]

    def limits(self) -> list[int]:
        """Per head, how many distances can have weight under any of the rules."""
        return [max(each) for each in zip(*(rule.limits() for rule in self.rules), strict=True)]

    def reach_list(self) -> list[int]:
        """Per head, the longest reach."""
        return [max(each) for each in zip(*(rule.reach_list() for rule in self.rules), strict=True)]

    def for_heads(self, heads: Sequence[int], kv_heads: Sequence[int] | None = None) -> Union:
        return Union(*(rule.for_heads(heads, kv_heads) for rule in self.rules))

    def __add__(self, other: Rule | Union) -> Union:
        """(a ∪ b) + (c ∪ d) = a + c ∪ b + c ∪ a + d ∪ b + d, with the shared terms in the first."""
        if not isinstance(other, Rule | Union):
            return NotImplemented
        mine, theirs = ([replace(first, **SHARED), *rest] for first, *rest in (self.rules, other.leaves()))
        _, *others = (a + b for b in theirs for a in mine)
        return Union(self.rules[0] + other.leaves()[0], *others)

    def __radd__(self, other: Rule) -> Union:
        return self + other if isinstance(other, Rule) else NotImplemented
