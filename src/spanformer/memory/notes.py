"""What a cache notes of each key beside the key itself, for heads whose rules are made of the keys' hidden states: how
long it lasts (`Rule.key_span`) or how much had been forgotten when it came (`Rule.forget`). One number a head and key.

A rule for new tokens alone carries the terms of those; the earlier keys' were noted when they were new.
Shapes: B batch, H query heads, T new tokens, Tk held and new ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops import Rule

TERMS = ("key_span", "forget")


def noteworthy(rule: Rule) -> bool:
    """Whether all that the rule says of its keys, if anything, can be noted."""
    parts = [part for _, part in rule.parts()]
    noted = any(getattr(part, name) is not None for part in parts for name in TERMS)
    return noted and all(part.key_bias is None for part in parts)


def take_notes(rule: Rule, batch: int, tokens: int, last: Tensor) -> Tensor | None:
    """[B, H, T] in float64, of a rule for T new tokens; None if it carries no such term. last [B, H]: what was noted of
    the token before them, from which forgetting goes on."""
    found, some = [], False
    for heads, part in rule.parts():
        given = [name for name in TERMS if getattr(part, name) is not None]
        if len(given) > 1:
            raise ValueError("a cache notes one number of each key, and heads here have both key_span and forget")
        note = torch.zeros(batch, len(heads), tokens, dtype=torch.float64, device=last.device)
        for name in given:
            some, note = True, note + getattr(part, name)
            if name == "forget":
                note = note + last[:, heads, None]
        found.append(note)
    return torch.cat(found, 1) if some else None


def with_notes(rule: Rule, notes: Tensor, dtype: torch.dtype) -> Rule:
    """The rule with the notes [B, H, Tk] of all keys in place of those of the new ones."""
    parts = []
    for heads, part in rule.parts():
        given = [name for name in TERMS if getattr(part, name) is not None]
        of_heads = notes[:, heads]
        # forgetting stays in float64: attend takes differences first
        terms = {name: of_heads if name == "forget" else of_heads.to(dtype) for name in given}
        parts.append(replace(part, **terms))
    return replace(rule, apart=tuple(parts)) if rule.apart else parts[0]
