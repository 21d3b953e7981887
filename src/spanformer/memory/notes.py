"""Notes: one number per head and key that a KV cache stores for rules that depend on the keys' hidden states, the key's
span (`Rule.key_span`) or its cumulative forget gate (`Rule.forget`).

A rule for new tokens carries their terms only; the terms of earlier keys were stored when those were new.
Shapes: B batch, H query heads, T new tokens, Tk held and new ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops import AnyRule, HeadGroups, Rule, Union

TERMS = ("key_span", "forget")


def noteworthy(rule: AnyRule) -> bool:
    """Whether all that the rule says of its keys, if anything, can be noted."""
    return any(map(_given, rule.leaves())) and all(leaf.key_bias is None for leaf in rule.leaves())


def take_notes(rule: AnyRule, batch: int, tokens: int, last: Tensor) -> Tensor | None:
    """[B, H, T] in float64, of a rule for T new tokens; None if it carries no such term. last [B, H]: what was noted of
    the token before them, from which forgetting goes on."""
    found, some = [], False
    for heads, part in rule.parts():
        leaf = part.leaves()[0]  # what is made of keys was added to all rules of a Union
        given = _given(leaf)
        if len(given) > 1:
            raise ValueError("a KV cache stores key_span or forget for each key, and these heads have both; drop one")
        note = torch.zeros(batch, len(heads), tokens, dtype=torch.float64, device=last.device)
        for name in given:
            some, note = True, note + getattr(leaf, name)
            if name == "forget":
                note = note + last[:, heads, None]
        found.append(note)
    return torch.cat(found, 1) if some else None


def with_notes(rule: AnyRule, notes: Tensor, dtype: torch.dtype) -> AnyRule:
    """The rule with the notes [B, H, Tk] of all keys in place of those of the new ones."""
    parts = []
    for heads, part in rule.parts():
        leaves = [_with(leaf, notes[:, heads], dtype) for leaf in part.leaves()]
        parts.append(leaves[0] if len(leaves) == 1 else Union(*leaves))
    return parts[0] if len(parts) == 1 else HeadGroups(parts)


def _with(rule: Rule, notes: Tensor, dtype: torch.dtype) -> Rule:
    # forgetting stays in float64: attend takes differences first
    return replace(rule, **{name: notes if name == "forget" else notes.to(dtype) for name in _given(rule)})


def _given(rule: Rule) -> list[str]:
    return [name for name in TERMS if getattr(rule, name) is not None]
