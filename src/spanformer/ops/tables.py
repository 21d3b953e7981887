"""Tables over distances: which entry a distance reads, and how two rules' tables are brought to the same indexing.

Entry n of a table is distance n, or |d| under a rule that sees the future too; with `max_future` it is distance n −
max_future, so that future keys (d < 0) have separate entries. distance_value may be short, because distances
beyond its ends read its last entry; with `max_future` it has distance 0 in its middle.

Shapes: H heads, L entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from spanformer.ops.lower import Dense
    from spanformer.ops.rule import Rule

ENDING = ("distance_bias", "distance_vec", "distance_scale")
"""a call that needs more distances than such a table has is refused"""
TABLES = (*ENDING, "distance_value")


def entry(d: Tensor, causal: bool, max_future: int) -> Tensor:
    """The entry that each signed distance d reads, not clamped to a table's length."""
    return d if causal else d + max_future if max_future else d.abs()


def future_of(rule: Rule | Dense, name: str) -> int:
    """The number of entries before distance 0 in a rule's table."""
    return getattr(rule, name).shape[1] // 2 if rule.max_future and name == "distance_value" else rule.max_future


def check_max_future(rule: Rule) -> None:
    if rule.max_future and rule.causal:
        raise ValueError(
            f"max_future is {rule.max_future} with causal=True, which never sees the future. Tables of a causal rule "
            "begin at distance 0: pass max_future=0"
        )
    for name in ENDING:
        if (table := getattr(rule, name)) is not None and table.shape[1] <= rule.max_future:
            raise ValueError(
                f"{name} has shape {list(table.shape)} and max_future is {rule.max_future}; expected an entry for "
                f"distance 0, so at least {rule.max_future + 1} entries"
            )
    if rule.max_future and rule.distance_value is not None and rule.distance_value.shape[1] % 2 == 0:
        raise ValueError(
            f"distance_value has shape {list(rule.distance_value.shape)} and max_future is {rule.max_future}; expected "
            "an odd number of entries, with distance 0 in the middle"
        )


def shared_max_future(a: Rule, b: Rule) -> int:
    """The max_future of the sum of two non-causal rules: the distances that both tables hold."""
    signed = [rule.max_future for rule in (a, b) if any(getattr(rule, name) is not None for name in TABLES)]
    if not any(signed):
        return 0
    tables = [(rule, getattr(rule, name)) for rule in (a, b) for name in ENDING]
    known = [rule.max_future or table.shape[1] - 1 for rule, table in tables if table is not None]
    if not min(known, default=1):
        raise ValueError(
            "a table of one entry, for distance 0, cannot be added to a rule that sees the future; make it longer"
        )
    return min(known) if known else max(signed)


def counted(rule: Rule, name: str, causal: bool, max_future: int) -> Tensor | None:
    """A rule's table [.., L, ..] as a rule with this causal and max_future reads it."""
    table = getattr(rule, name)
    if table is None:
        return None
    own, length = future_of(rule, name), table.shape[1]
    if causal:
        return table[:, own:] if own else table
    if max_future == rule.max_future or (rule.max_future and name == "distance_value"):
        return table
    least = -max_future if name in ENDING else 1 - length
    d = torch.arange(least, length - own, device=table.device)
    return table.index_select(1, entry(d, False, own))


def add_tables(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tables is as long as the shorter one."""
    a, b = _cut(a, b)
    return a + b


def multiply_tables(a: Tensor, b: Tensor) -> Tensor:
    a, b = _cut(a, b)
    return a * b


def add_values(a: Tensor, b: Tensor, signed: bool) -> Tensor:
    """The sum of two tables; the shorter one's last entry is repeated; if signed, its first too."""
    _check_sizes("distance_value", a, b)
    length = max(a.shape[1], b.shape[1])
    added = []
    for t in (a, b):
        more = length - t.shape[1]
        before = more // 2 if signed else 0
        index = torch.arange(-before, length - before, device=t.device).clamp(0, t.shape[1] - 1)
        added.append(t.index_select(1, index))
    return added[0] + added[1]


def _cut(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    _check_sizes("distance_vec", a, b)
    length = min(a.shape[1], b.shape[1])
    return a[:, :length], b[:, :length]


def _check_sizes(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape[2:] != b.shape[2:]:
        raise ValueError(
            f"{name} of shapes {list(a.shape)} and {list(b.shape)} cannot be added; expected one head size"
        )
