"""Notes: one number per head and key that a KV cache stores for rules that depend on the keys' hidden states, the key's
span (`Rule.key_span`) or its cumulative forget gate (`Rule.forget`).

A rule for new tokens has only their terms; the cache stored the terms of earlier keys when those were new.
Shapes: B batch, H query heads, T new tokens, Tk stored and new ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops import AnyRule, HeadGroups, Rule, Union

TERMS = ("key_span", "forget")


def noteworthy(rule: AnyRule) -> bool:
    """Whether the rule has terms of its keys, all of which notes can store."""
    return any(map(_given, rule.leaves())) and all(leaf.key_bias is None for leaf in rule.leaves())


def take_notes(rule: AnyRule, batch: int, tokens: int, last: Tensor) -> Tensor | None:
    """[B, H, T] in float64, the notes of a rule for T new tokens; None if it has no such term. last [B, H]: the notes
    of the token before them, at which the cumulative sum continues."""
    found, some = [], False
    for heads, part in rule.parts():
        leaf = part.leaves()[0]  # all rules of a Union have the same terms of keys
        given = _given(leaf)
        if len(given) > 1:
            raise ValueError(
                "a KV cache stores key_span or forget for each key, and these heads have both. Drop one of them"
            )
        note = torch.zeros(batch, len(heads), tokens, dtype=torch.float64, device=last.device)
        for name in given:
            some, note = True, note + getattr(leaf, name)
            if name == "forget":
                note = note + last[:, heads, None]
        found.append(note)
    return torch.cat(found, 1) if some else None


def with_notes(rule: AnyRule, notes: Tensor, dtype: torch.dtype) -> AnyRule:
    """The rule with the notes [B, H, Tk] of all keys instead of the new keys' terms."""
    parts = []
    for heads, part in rule.parts():
        leaves = [_with(leaf, notes[:, heads], dtype) for leaf in part.leaves()]
        parts.append(leaves[0] if len(leaves) == 1 else Union(*leaves))
    return parts[0] if len(parts) == 1 else HeadGroups(parts)


def _with(rule: Rule, notes: Tensor, dtype: torch.dtype) -> Rule:
    # forget stays in float64: attend subtracts before it rounds
    return replace(rule, **{name: notes if name == "forget" else notes.to(dtype) for name in _given(rule)})


def _given(rule: Rule) -> list[str]:
    return [name for name in TERMS if getattr(rule, name) is not None]
