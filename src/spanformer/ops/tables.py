"""Tables over distances: which entry a distance reads, and two rules' tables brought to one way of counting.

Entry n of a table is distance n, or |d| under a rule that sees the future too; with `ahead` it is distance n − ahead,
so that keys ahead of the query (d < 0) have entries of their own.

Shapes: H heads, L entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from spanformer.ops.rule import Rule

ENDING = ("distance_bias", "distance_vec", "distance_scale")
"""attention farther than such a table goes is refused"""
TABLES = (*ENDING, "distance_value")
"""the last one's ends are read for all that lies beyond them"""


def entry(d: Tensor, causal: bool, ahead: int) -> Tensor:
    """Where signed distances d are read, not clamped to a table's length."""
    return d if causal else d + ahead if ahead else d.abs()


def check_ahead(rule: Rule) -> None:
    if rule.ahead < 0:
        raise ValueError(f"ahead is {rule.ahead}; expected a number of distances, 0 or more")
    if rule.ahead and rule.causal:
        raise ValueError(
            f"ahead is {rule.ahead} with causal=True, which sees nothing ahead; tables of a causal rule begin at "
            "distance 0"
        )
    for name in TABLES:
        table = getattr(rule, name)
        if table is not None and table.shape[1] <= rule.ahead:
            raise ValueError(
                f"{name} has shape {list(table.shape)} and ahead is {rule.ahead}; expected an entry for distance 0, so "
                f"at least {rule.ahead + 1}"
            )


def shared_ahead(a: Rule, b: Rule) -> int:
    """How far ahead the sum of two rules that both see the future counts its tables."""
    if not a.ahead and not b.ahead:
        return 0
    ending, others = [], []  # how far ahead each table knows
    for rule in (a, b):
        for name in TABLES:
            if (table := getattr(rule, name)) is not None:
                (ending if name in ENDING else others).append(rule.ahead or table.shape[1] - 1)
    return min(ending) if ending else max(others, default=0)


def counted(rule: Rule, name: str, causal: bool, ahead: int) -> Tensor | None:
    """A rule's table [.., L, ..] as a rule with this causal and ahead reads it."""
    table = getattr(rule, name)
    if table is None or (causal and not rule.ahead) or (not causal and ahead == rule.ahead):
        return table
    if causal:
        return table[:, rule.ahead :]
    length = table.shape[1]
    d = torch.arange(-ahead, length - rule.ahead, device=table.device)
    return table.index_select(1, entry(d, False, rule.ahead).clamp(0, length - 1))


def add_tables(a: Tensor, b: Tensor) -> Tensor:
    """Tables of different lengths are known together only as far as the shorter goes."""
    a, b = _cut(a, b)
    return a + b


def multiply_tables(a: Tensor, b: Tensor) -> Tensor:
    a, b = _cut(a, b)
    return a * b


def add_values(a: Tensor, b: Tensor) -> Tensor:
    """The shorter one's last entry goes on."""
    _check_sizes("distance_value", a, b)
    length = max(a.shape[1], b.shape[1])
    a, b = (torch.cat([t, t[:, -1:].expand(-1, length - t.shape[1], -1)], 1) for t in (a, b))
    return a + b


def _cut(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    _check_sizes("distance_vec", a, b)
    length = min(a.shape[1], b.shape[1])
    return a[:, :length], b[:, :length]


def _check_sizes(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape[2:] != b.shape[2:]:
        raise ValueError(
            f"{name} of shapes {list(a.shape)} and {list(b.shape)} cannot be added; expected one head size"
        )
