"""Groups of heads that differ in kind, not only in numbers: another ramp, a pattern, sink tokens. Each group has its
own rule, and `attend` runs the groups one by one.

    HeadGroups([Rule(6, reach=64), Rule(2, span=z, ramp=8)])          heads 0 … 5, then 6 and 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from spanformer.ops.rule import Rule
from spanformer.ops.union import Union


@dataclass(frozen=True, eq=False)
class HeadGroups:
    """The rules of consecutive groups of heads. All have the same `causal` and `paper_compat`."""

    groups: Sequence[Rule | Union]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ValueError("groups is empty; expected the rule of at least one group of heads")
        for rule in self.groups:
            if not isinstance(rule, Rule | Union):
                raise ValueError(f"groups holds a {type(rule).__name__}; expected one Rule or Union per group")
            for name in ("causal", "paper_compat"):
                if getattr(rule, name) != getattr(self.groups[0], name):
                    raise ValueError(
                        f"groups holds rules with {name} = True and False; expected one value for all heads"
                    )

    @property
    def heads(self) -> int:
        return sum(rule.heads for rule in self.groups)

    @property
    def causal(self) -> bool:
        return self.groups[0].causal

    @property
    def paper_compat(self) -> bool:
        return self.groups[0].paper_compat

    @property
    def dynamic(self) -> bool:
        return any(rule.dynamic for rule in self.groups)

    def leaves(self) -> tuple[Rule, ...]:
        return tuple(leaf for rule in self.groups for leaf in rule.leaves())

    def parts(self) -> list[tuple[list[int], Rule | Union]]:
        """[(heads, their rule)] of each group."""
        ends = [0, *accumulate(rule.heads for rule in self.groups)]
        return [(list(range(first, end)), rule) for (first, end), rule in zip(pairwise(ends), self.groups, strict=True)]

    def limits(self) -> list[int]:
        return [n for rule in self.groups for n in rule.limits()]

    def reach_list(self) -> list[int]:
        return [n for rule in self.groups for n in rule.reach_list()]

    def for_heads(self, heads: Sequence[int], kv_heads: Sequence[int] | None = None) -> AnyRule:
        """The rule of some heads, in the order given; neighbouring heads of a group stay one group."""
        where = [(n, h - mine[0]) for n, (mine, _) in enumerate(self.parts()) for h in mine]  # group, number in it
        runs = [(n, [local for _, local in run]) for n, run in groupby((where[h] for h in heads), key=lambda at: at[0])]
        some = []
        for n, local in runs:
            whole = local == list(range(self.groups[n].heads))
            some.append(self.groups[n] if whole else self.groups[n].for_heads(local))
        return some[0] if len(some) == 1 else HeadGroups(some)

    def __add__(self, other: AnyRule) -> HeadGroups:
        """Split the heads at every boundary of either rule, and add group by group."""
        if not isinstance(other, Rule | Union | HeadGroups):
            return NotImplemented
        if self.heads != other.heads:
            raise ValueError(
                f"rules of {self.heads} and {other.heads} heads cannot be added; expected one number of heads"
            )
        cuts = sorted({mine[0] for rule in (self, other) for mine, _ in rule.parts()} | {self.heads})
        added = (
            self.for_heads(range(first, end)) + other.for_heads(range(first, end)) for first, end in pairwise(cuts)
        )
        return HeadGroups([rule for each in added for _, rule in each.parts()])

    def __radd__(self, other: Rule | Union) -> HeadGroups:
        return self + other if isinstance(other, Rule | Union) else NotImplemented


AnyRule = Rule | Union | HeadGroups
"""the rules that `attend`, mechanisms, KV caches and costs take: one for all heads, a Union, or one per group"""
