"""One attention call as lowering receives it: its tensors, and the rule.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.rule import Rule


class Numbers(NamedTuple):
    """The indices of heads, queries and keys in dropout's hash. A call that was split off another one keeps the
    indices, and so drops the same weights."""

    heads: Tensor
    """[B, H] int64: b·H + h by default"""
    queries: Tensor
    """[1 or B, Tq] int64"""
    keys: Tensor
    """[1 or B, Tk] int64"""


@dataclass(eq=False)  # never changed, but not frozen: every call makes two, and freezing takes microseconds
class Inputs:
    """A call without its rule."""

    q: Tensor
    """[B, H, Tq, D]"""
    k: Tensor
    """[B, Hkv, Tk, D]"""
    v: Tensor
    """[B, Hkv, Tk, Dv]"""
    scale: float
    """multiplies q·k and q·r[d]"""
    dropout: float = 0.0
    seed: Tensor | None = None
    """[1] int64 when dropout > 0"""
    q_positions: Tensor | None = None
    """[1 or B, Tq] int64; None together with k_positions: keys are at 0 … Tk − 1, queries the last Tq of them"""
    k_positions: Tensor | None = None
    """[1 or B, Tk] int64"""
    q_documents: Tensor | None = None
    """[1 or B, Tq] int64, with k_documents"""
    k_documents: Tensor | None = None
    """[1 or B, Tk] int64"""
    numbers: Numbers | None = None
    """None: all count from 0"""

    @property
    def offset(self) -> int:
        """Implicit positions: query i is at i + offset, key j at j."""
        return self.k.shape[2] - self.q.shape[2]

    def positions(self) -> tuple[Tensor, Tensor]:
        """[1 or B, Tq] and [1 or B, Tk], made explicit."""
        if self.q_positions is not None and self.k_positions is not None:
            return self.q_positions, self.k_positions
        keys = torch.arange(self.k.shape[2], device=self.k.device)[None]
        return torch.arange(self.q.shape[2], device=self.q.device)[None] + self.offset, keys

    def numbered(self) -> Numbers:
        """The indices for dropout, made explicit."""
        if self.numbers is not None:
            return self.numbers
        (b, h, tq, _), tk, at = self.q.shape, self.k.shape[2], self.q.device
        heads = torch.arange(b * h, device=at).view(b, h)
        return Numbers(heads, torch.arange(tq, device=at)[None], torch.arange(tk, device=at)[None])


@dataclass(eq=False)
class Call(Inputs):
    """A call that `make_call` checked. Passes remove terms from its rule until `flatten` can make it `Lowered`."""

    rule: Rule = field(kw_only=True)
    others: tuple[Call, ...] = ()
    """one call for each other rule of a Union, in the same softmax, with the same q, k and v"""

    @property
    def shift(self) -> int:
        """The number subtracted from every distance (the paper's code counts from the previous token)."""
        return 1 if self.rule.paper_compat else 0

    def each(self, change: Callable[[Call], Call]) -> Call:
        """This call with changes, which its other rules' calls get too."""
        return replace(change(self), others=tuple(change(other) for other in self.others))


def longest_distance(call: Call) -> int:
    """How many of the distances 0, 1, … can occur between a query and a key of this call."""
    back, future = extents(call)
    return back if call.rule.causal else max(back, future)


def extents(call: Call) -> tuple[int, int]:
    """How many of the distances 0, 1, … can occur, and how many of 0, −1, …"""
    tq, tk = call.q.shape[2], call.k.shape[2]
    if not tq or not tk or not call.q.shape[0]:
        return 0, 0
    if call.q_positions is None or call.k_positions is None:
        back, future = tk - 1, tq - 1  # queries are at tk − tq … tk − 1
    else:  # row by row: rows of a batch may be far from each other
        back = int((call.q_positions.amax(1) - call.k_positions.amin(1)).max())
        future = int((call.k_positions.amax(1) - call.q_positions.amin(1)).max())
    return max(0, back + 1 - call.shift), max(0, future + 1 + call.shift)
