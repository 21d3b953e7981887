"""Heads that stand apart: one rule made of several, each for its own heads (`Rule.apart`), because they differ in more
than numbers. A layer goes on adding to it and taking heads from it as it does with any rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from spanformer.ops.rule import Rule

SHARED = ("heads", "causal", "original", "penalty", "apart")  # what a rule of rules says itself


def check_apart(rule: Rule) -> None:
    heads = [part.heads for part in rule.apart]
    if sum(heads) != rule.heads:
        raise ValueError(f"apart holds rules of {heads} heads; expected {rule.heads} in all, as heads says")
    for part in rule.apart:
        if part.apart:
            raise ValueError("apart holds a rule that has rules apart itself; expected them one after the other")
        for name in ("causal", "original"):
            if getattr(part, name) != getattr(rule, name):
                raise ValueError(f"apart holds rules with {name} = True and False; expected one for all heads")
    own = [f.name for f in fields(rule) if f.name not in (*SHARED, "ramp") and getattr(rule, f.name) != f.default]
    if own:
        raise ValueError(f"{' and '.join(own)} stands beside apart; add it to the rules that apart holds (`+` does)")


def pick_apart(rule: Rule, heads: Sequence[int]) -> Rule:
    """The rule of some heads, in the order given."""
    where = [(n, h - mine[0]) for n, (mine, _) in enumerate(rule.parts()) for h in mine]  # by head: part, number in it
    runs = [(n, [local for _, local in run]) for n, run in groupby((where[h] for h in heads), key=lambda at: at[0])]
    parts = [rule.apart[n].for_heads(local) for n, local in runs]
    if len(parts) == 1:
        return replace(parts[0], penalty=rule.penalty)
    return replace(rule, heads=len(heads), apart=tuple(parts))


def add_apart(a: Rule, b: Rule) -> Rule:
    """a + b, cut wherever one of them is."""
    cuts = sorted({mine[0] for rule in (a, b) for mine, _ in rule.parts()} | {a.heads})
    both = []
    for first, end in pairwise(cuts):
        some = range(first, end)
        both.append(replace(a.for_heads(some) + b.for_heads(some), penalty=None))
    given = [rule.penalty for rule in (a, b) if rule.penalty is not None]
    penalty = None if not given else given[0] if len(given) == 1 else given[0] + given[1]
    return stand_apart(both, penalty)


def stand_apart(rules: Sequence[Rule], penalty: Tensor | None) -> Rule:
    """One rule of several, for the heads of all, one after the other; causal and original must agree."""
    bare = {f.name: f.default for f in fields(rules[0]) if f.name not in SHARED}
    heads = sum(rule.heads for rule in rules)
    return replace(rules[0], **bare, heads=heads, penalty=penalty, apart=tuple(rules))


def by_parts(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> list[tuple[Tensor, Tensor, Tensor, Rule]]:
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, ·] and the rule of each part's heads."""
    if rule.heads != q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; expected {rule.heads} heads in q, as the rule has, "
            "and a number in k that divides it"
        )
    shared, found = q.shape[1] // k.shape[1], []
    for heads, part in rule.parts():
        first, end = heads[0], heads[-1] + 1
        if first % shared or end % shared:  # a key/value head is used by two parts: each head gets its own
            own = torch.tensor([h // shared for h in heads], device=k.device)
            some = k.index_select(1, own), v.index_select(1, own)
        else:
            some = k[:, first // shared : end // shared], v[:, first // shared : end // shared]
        found.append((q[:, first:end], *some, part))
    return found
