"""Attention along any pattern, one for all heads or one for each.

    a_ij ∝ exp(s_ij)   for (i, j) in the head's pattern, and j ≤ i if causal

Patterns are sets of pairs: see spanformer.attention.pattern.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanformer.attention.base import Attention, RuleNeeds, View
from spanformer.attention.pattern import Pattern, make_rule, parse
from spanformer.attention.pattern.rule import check_size, disjoint
from spanformer.kinds import HeadSpec
from spanformer.ops import Rule, Union


def check_limit(name: str, tokens: int, max_span: int) -> None:
    """Refuse blocks that max_span would cut: the pattern would be another one."""
    if tokens > max_span:
        raise ValueError(f"{name} is {tokens} and max_span {max_span}; expected a block within max_span")


class Patterned(Attention):
    """pattern: one, or one for each head. longest: the most tokens back that a head sees, itself included;
    without it, a pattern that sees everything needs unlimited memory. size: positions per block, if it runs by
    blocks."""

    def __init__(
        self,
        heads: int,
        pattern: Pattern | Sequence[Pattern],
        *,
        causal: bool = True,
        longest: int | None = None,
        size: int = 64,
    ) -> None:
        super().__init__()
        patterns = (pattern,) * heads if isinstance(pattern, Pattern) else tuple(pattern)
        if len(patterns) != heads or not all(isinstance(p, Pattern) for p in patterns):
            raise ValueError(
                f"pattern is a list of {len(patterns)} for {heads} heads; expected one pattern, or one for each head"
            )
        if longest is not None and longest < 1:
            raise ValueError(f"longest is {longest}; expected at least 1 token")
        check_size(size)
        self.heads, self.patterns, self.causal, self.longest, self.size = heads, patterns, causal, longest, size
        bands = [disjoint(p.bands(causal)) for p in patterns]
        self.by_blocks = None in bands  # otherwise distances describe it
        self.strided = any(band[:2] != (1, 0) for some in bands for band in some or ())

    @classmethod
    def parse(cls, spec: HeadSpec) -> Patterned:
        """Heads with the pattern of the expression spec.text."""
        return Patterned(spec.heads, parse(spec.text), causal=spec.causal, longest=spec.section.max_span)

    def rule_needs(self) -> RuleNeeds:
        return "positions" if self.by_blocks or self.strided else "nothing"

    def rule(self, view: View | None = None) -> Rule | Union:
        """The rule for the keys of view.start and view.length; a pattern of distances needs no view."""
        length, start, device, queries = 0, 0, "cpu", None
        if self.by_blocks:
            if view is None or (view.length is None and view.x is None):
                raise ValueError(f"{self.patterns[0]} depends on the positions of keys; pass a view with length or x")
            if view.x is not None:
                length, device, queries = view.x.shape[1], str(view.x.device), view.x.shape[1]
            length, start = length if view.length is None else view.length, view.start
        rule = make_rule(self.patterns, length, start, self.causal, self.size, device, queries)
        return rule if self.longest is None else rule + Rule(self.heads, causal=self.causal, reach=self.longest)

    def context_length(self) -> list[int]:
        far = [p.context_length() for p in self.patterns]
        return far if self.longest is None else [min(n, self.longest - 1) for n in far]

    def extra_repr(self) -> str:
        same = len(set(self.patterns)) == 1
        shown = str(self.patterns[0]) if same else "; ".join(map(str, self.patterns))
        return f"heads={self.heads}, {shown}" + ("" if self.causal else ", causal=False")
