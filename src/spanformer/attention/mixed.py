"""Heads of several kinds in one layer: for instance six fixed windows and two adaptive spans.

out = [out_1, …, out_H]        head h uses the rule and the scoring of its part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from spanformer.attention.base import Attention, RuleNeeds, View, remembers_itself
from spanformer.attention.parts import Parts
from spanformer.ops import AnyRule, BlockIndex, HeadGroups, Rule, Union
from spanformer.ops.rule import HEAD_AXIS, soft

NO_EDGE = float(1 << 24)  # stands for no span: beyond any sequence, and exact in float32


class Mixed(Parts):
    """Each part gives the rule of its heads. A mechanism that overrides `forward` or has its own memory cannot be a
    part; `mix` combines those with their own memory."""

    def __init__(self, parts: Sequence[Attention]) -> None:
        super().__init__(parts)
        for part in parts:
            if remembers_itself(part):
                raise ValueError(f"{type(part).__name__} has its own memory and no rule; combine it by `mix`")

    def rule_needs(self) -> RuleNeeds:
        needs = {part.rule_needs() for part in self.each()}
        return "states" if "states" in needs else "positions" if "positions" in needs else "nothing"

    def rule(self, view: View) -> AnyRule:
        return join([part.rule(view) for part in self.each()])

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        total, first = None, 0
        for part in self.each():
            if type(part).penalty is not Attention.penalty:
                added = part.penalty(rule.for_heads(range(first, first + part.heads)), view)
                total = added if total is None else total if added is None else total + added
            first += part.heads
        return total


def join(rules: Sequence[AnyRule]) -> AnyRule:
    """One rule for the heads of all these rules, in this order.

    Neighbours that differ only in numbers (reaches, spans, strides, tables, biases, sinks, patterns of one size)
    become one; others become HeadGroups, and attend runs each group separately. All must have the same causal and
    paper_compat."""
    for name in ("causal", "paper_compat"):
        if len({getattr(rule, name) for rule in rules}) > 1:
            raise ValueError(f"the heads of one layer have {name} = True and False; expected one value for all")
    joined: list[list[Rule] | Union] = []
    for rule in (part for each in rules for _, part in each.parts()):
        last = joined[-1] if joined else None
        if isinstance(rule, Union):
            joined.append(rule)
        elif isinstance(last, list) and all(alike(one, rule) for one in last):
            last.append(rule)
        else:
            joined.append([rule])
    groups = [some if isinstance(some, Union) else _unite(some) for some in joined]
    return groups[0] if len(groups) == 1 else HeadGroups(groups)


def alike(a: Rule, b: Rule) -> bool:
    """Whether two rules differ only in terms per head. A head without a span can get an endless one;
    any other term must be in both or in neither."""
    for field in fields(Rule):
        name, mine, theirs = field.name, getattr(a, field.name), getattr(b, field.name)
        if name in ("heads", "reach", "span", "stride", "skip"):
            continue
        if name == "ramp":
            if soft(a) and soft(b) and mine != theirs:
                return False
        elif mine is None or theirs is None:
            if mine is not theirs:
                return False
        elif name == "blocks":
            if (mine.size, mine.rows) != (theirs.size, theirs.rows):
                return False
        elif name in HEAD_AXIS:
            axis = HEAD_AXIS[name]
            if mine.dtype != theirs.dtype or mine.shape[axis + 1 :] != theirs.shape[axis + 1 :]:
                return False
        elif isinstance(mine, int | float):
            if mine != theirs:
                return False
        elif mine is not theirs:  # documents or any other term: the same object, or a separate group
            return False
    return True


def _unite(rules: list[Rule]) -> Rule:
    """One rule from compatible ones."""
    first = rules[0]
    if len(rules) == 1:
        return first
    reach = None
    if any(rule.reach is not None for rule in rules):
        reach = [r for rule in rules for r in rule.reach_list()]
    terms = {name: _side_by_side(rules, name, axis) for name, axis in HEAD_AXIS.items()}
    blocks = [(rule.blocks, rule.heads) for rule in rules if rule.blocks is not None]
    return replace(
        first,
        heads=sum(rule.heads for rule in rules),
        reach=reach,
        span=_join_spans(rules),
        ramp=next((rule.ramp for rule in rules if soft(rule)), first.ramp),
        stride=[stride for rule in rules for stride, _ in rule.strides()],
        skip=[skip for rule in rules for _, skip in rule.strides()],
        blocks=BlockIndex.side_by_side(blocks) if blocks else None,
        **terms,
    )


def _side_by_side(rules: list[Rule], name: str, axis: int) -> Tensor | None:
    """A term that all rules have or none has, for all heads; a shared one stays shared."""
    given = [getattr(rule, name) for rule in rules]
    if given[0] is None or (given[0].shape[axis] == 1 and all(t is given[0] for t in given)):
        return given[0]
    each = [t.repeat_interleave(rule.heads // t.shape[axis], axis) for t, rule in zip(given, rules, strict=True)]
    if axis:  # [1 or B, …]
        rows = max(t.shape[0] for t in each)
        each = [t.expand(rows, *t.shape[1:]) for t in each]
    return torch.cat(each, axis)


def _join_spans(rules: Sequence[Rule]) -> Tensor | None:
    """[H], or [B, H, Tq] if any part is dynamic; heads without a span get one beyond every distance."""
    given = [rule.span for rule in rules if rule.span is not None]
    if not given:
        return None
    largest = max(given, key=lambda t: t.ndim)
    spans = []
    for rule in rules:
        span = largest.new_full((rule.heads,), NO_EDGE) if rule.span is None else rule.span
        if span.ndim < largest.ndim:
            span = span[None, :, None].expand(largest.shape[0], -1, largest.shape[2])
        spans.append(span)
    return torch.cat(spans, 1 if largest.ndim == 3 else 0)
