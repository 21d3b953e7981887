"""Cost of kinds in the notation of run files: single kinds, mixtures by head, patterns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

from spanformer.cost.mechanisms import AttentionCost, Cost, attention_cost, together
from spanformer.cost.sizes import Sizes
from spanformer.kinds.cross import CROSS
from spanformer.kinds.notation import fill, is_pattern, parse_kind, split_parts, written
from spanformer.kinds.registry import KINDS
from spanformer.kinds.spec import Kind, Section, resolve

LONGEST = 1 << 17
"""longest text in tokens for patterns, whose pairs are counted block by block"""
COSTED: Mapping[str, Kind] = {CROSS.name: CROSS}
"""specs that have a cost but are no kind of self-attention"""


class Priced(NamedTuple):
    """One kind with everything that its cost depends on."""

    name: str
    about: str
    cost: Cost
    params: Mapping[str, float | str]


def layer_cost(text: str, sizes: Sizes, where: str = "kind") -> AttentionCost:
    """The cost at these sizes of a layer whose heads are written as in a run file."""
    parts, shared = split_heads(text, sizes.heads, where), sizes.heads // sizes.groups
    if any(count % shared for count, _ in parts):
        raise ValueError(f"{where} is {text!r}; expected multiples of {shared} heads, which share keys")
    costs = []
    for count, part in parts:
        priced = price(part, sizes.length, where)
        if len(parts) > 1 and priced.cost.alone(SimpleNamespace(**priced.params)):
            raise ValueError(f"{where} is {text!r}; {priced.name} cannot share a layer with other kinds")
        some = replace(sizes, heads=count, kv_heads=count // shared, width=sizes.dim)
        costs.append((count, attention_cost(*priced, some)))
    return costs[0][1] if len(costs) == 1 else together(text, costs)


def split_heads(text: str, heads: int, where: str) -> list[tuple[int, str]]:
    """(heads, kind) of each part of a mixture; one kind is all heads."""
    parts = [(heads if part.heads is None else part.heads, part.text) for part in split_parts(text)]
    if (total := sum(count for count, _ in parts)) != heads:
        raise ValueError(f"{where} is {text!r}, which has {total} heads; expected {heads}")
    return parts


def price(text: str, length: int, where: str = "kind") -> Priced:
    """'window(128)', or a pattern, with the parameters that its cost depends on. Without a max_span, heads may see the
    whole length."""
    if is_pattern(text):
        return _pattern(text)
    kind, given = parse_kind(text, where, {**KINDS, **COSTED}, assumed=True)
    params = fill(kind, given, Section(max_span=length), where)
    shown = {name: v for name, v in params.items() if name in given or (name != "max_span" and v is not False)}
    return Priced(written(kind, shown), kind.help, kind.cost, params)


def _pattern(text: str) -> Priced:
    pattern = resolve("spanformer.attention.pattern:parse")(text)
    far = pattern.context_length() + 1

    def pairs(n: int, causal: bool, p: object) -> int:
        if n > LONGEST:
            raise ValueError(f"length is {n}; expected at most {LONGEST:,} for {pattern}, whose pairs are counted")
        return pattern.pairs(n, causal=causal)

    return Priced(str(pattern), "the pattern", Cost("", pairs, lambda n, p: min(n, far), kept=None), {})
