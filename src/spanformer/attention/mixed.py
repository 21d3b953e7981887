"""Heads of several kinds in one layer: for instance six fixed windows and two heads that learn their span.

out = [out_1, …, out_H]        head h by the rule, and the scoring, of the part that it belongs to
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View
from spanformer.ops import BlockIndex, Rule, stand_apart
from spanformer.ops.rule import HEAD_AXIS, soft

NO_EDGE = float(1 << 24)  # the span of a head that has none: beyond any sequence, and exact in float32


class Mixed(Attention):
    """The heads of each part, one part after the other. Parts say what their heads see; one that mixes values in a way
    of its own cannot stand beside others."""

    def __init__(self, parts: Sequence[Attention]) -> None:
        super().__init__()
        if not parts:
            raise ValueError("parts is empty; expected at least one mechanism")
        for part in parts:
            if part.alone:
                raise ValueError(
                    f"{type(part).__name__}({part.extra_repr()}) mixes values in its own way, so that its heads cannot "
                    "share a layer with other kinds; give it all heads of a layer"
                )
        self.parts = nn.ModuleList(parts)
        self.heads = sum(part.heads for part in parts)
        self.kept = max(part.kept for part in parts)
        self.placed, self.reads_keys = (any(getattr(p, name) for p in parts) for name in ("placed", "reads_keys"))
        self.turnable = all(part.turnable for part in parts)

    def rule(self, view: View) -> Rule:
        return join([part.rule(view) for part in self._parts()])

    def map_queries(self, q: Tensor) -> Tensor:
        """Each part its own heads'."""
        pieces = q.split([part.heads for part in self._parts()], 1)
        mapped = [part.map_queries(piece) for part, piece in zip(self._parts(), pieces, strict=True)]
        return q if all(a is b for a, b in zip(mapped, pieces, strict=True)) else torch.cat(mapped, 1)

    def lookback(self) -> list[int]:
        return [n for part in self._parts() for n in part.lookback()]

    def learned(self) -> list[float | None]:
        return [z for part in self._parts() for z in part.learned()]

    def looked(self) -> list[int]:
        return [n for part in self._parts() for n in part.looked()]

    def after_step(self) -> None:
        for part in self._parts():
            part.after_step()

    def _parts(self) -> list[Attention]:
        return [part for part in self.parts if isinstance(part, Attention)]


def join(rules: Sequence[Rule]) -> Rule:
    """One rule for the heads of all, in this order.

    Neighbours that differ in numbers alone (reaches, spans, strides, tables, biases, sinks, patterns of one size)
    become one; others stand apart, and attend runs each by itself. All must look in the same direction (causal,
    original)."""
    for name in ("causal", "original"):
        if len({getattr(rule, name) for rule in rules}) > 1:
            raise ValueError(f"the heads of one layer have {name} = True and False; expected one for all")
    penalties = [rule.penalty for rule in rules if rule.penalty is not None]
    penalty = sum(penalties[1:], penalties[0]) if penalties else None
    joined: list[list[Rule]] = []
    for rule in (part for each in rules for _, part in each.parts()):
        if joined and all(alike(one, rule) for one in joined[-1]):
            joined[-1].append(rule)
        else:
            joined.append([rule])
    parts = [_unite(some) for some in joined]
    return replace(parts[0], penalty=penalty) if len(parts) == 1 else stand_apart(parts, penalty)


def alike(a: Rule, b: Rule) -> bool:
    """Whether the two differ only in what a rule holds for each head. A head without a span can have one without end;
    any other term both must have, or neither."""
    for field in fields(Rule):
        name, mine, theirs = field.name, getattr(a, field.name), getattr(b, field.name)
        if name in ("heads", "reach", "span", "stride", "skip", "penalty"):
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
        elif mine is not theirs:  # documents, also, or a term that this file does not know: the very same or apart
            return False
    return True


def _unite(rules: list[Rule]) -> Rule:
    """Rules that are alike, as one."""
    first = rules[0]
    if len(rules) == 1:
        return replace(first, penalty=None)
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
        penalty=None,
        **terms,
    )


def _side_by_side(rules: list[Rule], name: str, axis: int) -> Tensor | None:
    """A term that all have or none, for the heads of all; what all share stays shared."""
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
