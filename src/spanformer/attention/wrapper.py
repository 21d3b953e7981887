"""The base of mechanisms that wrap another one and use its rule."""

from __future__ import annotations

from torch import Tensor

from spanformer.attention.base import Attention, RuleNeeds, View, remembers_itself
from spanformer.ops import AnyRule


class Wrapper(Attention):
    def __init__(self, inner: Attention) -> None:
        super().__init__()
        if inner.supports(mixed=True) or remembers_itself(inner):
            raise ValueError(
                f"{type(inner).__name__} has its own `forward` or memory; {type(self).__name__} "
                "needs a mechanism that only has a rule"
            )
        if getattr(inner, "paper_compat", False):
            raise ValueError(f"the paper's code has no {type(self).__name__}; expected paper_compat=False")
        self.inner, self.heads, self.sink_tokens = inner, inner.heads, inner.sink_tokens
        self.causal = getattr(inner, "causal", True)

    def rule(self, view: View) -> AnyRule:
        return self.inner.rule(view)

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        return self.inner.penalty(rule, view)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        return self.inner.supports(position=position, cache=cache, mixed=mixed, persistent=persistent)

    def rule_needs(self) -> RuleNeeds:
        return self.inner.rule_needs()

    def map_queries(self, q: Tensor) -> Tensor:
        return self.inner.map_queries(q)

    def context_length(self) -> list[int]:
        return self.inner.context_length()

    def spans(self) -> list[float | None]:
        return self.inner.spans()

    def mean_context(self) -> list[int]:
        return self.inner.mean_context()

    def after_step(self) -> None:
        self.inner.after_step()
