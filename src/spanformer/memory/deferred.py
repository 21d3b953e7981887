"""Keys and values that skipped layers have not stored yet, and the states they will be projected from.

A token that leaves the stack early has keys and values in the layers above, for tokens that go deeper. A layer projects
them when such a token comes, and only those within its reach: a layer whose heads see 16 tokens never projects a token
that 16 shallow ones follow. This is where spans and depth multiply. A token keeps its state after it has left, so one
state serves all the layers that it skipped.

Shapes: B batch, L layers, S slots of a row (sink tokens, then a ring), T new tokens, m tokens of any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.memory.head_cache import HeadCache
from spanformer.memory.slots import write_at

ProjectAt = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, states [m, dim], positions [m]) → keys, with their positions encoded, and values [m, Hkv, D]"""


class Projected(NamedTuple):
    """Pairs of a token and a layer that it skipped."""

    deferred: int
    """those that were not projected at once"""
    flushed: int
    """those of them that a later token needed"""

    @property
    def saved(self) -> int:
        return self.deferred - self.flushed


class Deferred:
    """For layers whose memories are rings. A row's tokens wait until the row itself needs them."""

    def __init__(
        self, rings: Sequence[HeadCache], dim: int, project: ProjectAt, counts: Projected | None = None
    ) -> None:
        """rings: of each layer; they share `place`."""
        self.rings, self.dim, self.project = list(rings), dim, project
        self.counts = counts or Projected(0, 0)
        self.sinks = max(ring.sink_tokens for ring in rings)
        self.ring = max(max(ring.store.capacities) for ring in rings)
        batch, slots = rings[0].batch, self.sinks + self.ring
        with torch.inference_mode(False):  # so that both modes can write to them
            self.states = torch.zeros(batch, slots, dim, dtype=rings[0].dtype, device=rings[0].device)
            self.at = torch.full((batch, slots), -1)
            """[B, S] positions, of slots that wait"""
            self.pending = torch.zeros(len(rings), batch, slots, dtype=torch.bool)
        self.waiting = [False] * len(rings)
        """[L] whether any token may wait for a layer"""

    @property
    def place(self) -> Tensor:
        return self.rings[0].place

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.states, self.at, self.pending))

    def defer(self, states: Tensor, taken: Tensor, real: Tensor | None) -> None:
        """After a pass of T new tokens, before `place` advances: their states [B, T, dim] and the layers [B, T] they
        ran through. Layers above the deepest token of a row have stored nothing. real [B]: as in `Step`."""
        layers, deepest = len(self.rings), taken.amax(1).cpu()
        if int(deepest.min()) == layers and not any(self.waiting):
            return
        row, column, slot, position = self._slots_of(states.shape[1], real)
        at = [i.to(states.device) for i in (row, column, slot)]
        self.states[at[0], at[2]] = states[at[0], at[1]].to(self.states.dtype)
        self.at[row, slot] = position
        skipped = torch.arange(layers)[:, None] >= deepest[row]
        self.pending[:, row, slot] = skipped  # what was there before is out of reach
        self.waiting = [was or now for was, now in zip(self.waiting, skipped.any(1).tolist(), strict=True)]
        tokens = torch.full_like(deepest, states.shape[1]) if real is None else real
        self._count(deferred=int(((layers - deepest) * tokens).sum()))

    def _slots_of(self, new: int, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row, column, slot and position [m] of the new tokens that have a slot."""
        token, count = torch.arange(new), torch.full_like(self.place, new) if real is None else real
        position = self.place[:, None] + token
        early = position < self.sinks
        held = (token < count[:, None]) & (early | (token >= count[:, None] - self.ring))
        row, column = held.nonzero(as_tuple=True)
        slot = torch.where(early, position, self.sinks + position % self.ring)
        return row, column, slot[row, column], position[row, column]

    def flush(self, layer: int, active: Tensor | None, new: int) -> None:
        """Before tokens attend in a layer: store what they will see. active [N]: as in `View`, of T = new tokens."""
        if not self.waiting[layer]:
            return
        rows = torch.ones(len(self.place), dtype=torch.bool)
        if active is not None:
            rows = torch.zeros_like(rows).index_fill_(0, active.cpu() // new, True)
        self._store(layer, self.place - max(self.rings[layer].reach) + 1, rows)

    @torch.inference_mode()
    def settle(self) -> None:
        """Store everything that waits and that a ring has room for."""
        for n, ring in enumerate(self.rings):
            first = self.place - max(ring.store.capacities)
            self._store(n, first, torch.ones(len(self.place), dtype=torch.bool))
            self.pending[n], self.waiting[n] = False, False

    def _store(self, layer: int, first: Tensor, rows: Tensor) -> None:
        """Store what rows [B] bool have waiting for a layer from positions first [B] on, and sink tokens."""
        ring, pending = self.rings[layer], self.pending[layer]
        seen = (self.at >= first[:, None]) | (self.at < ring.sink_tokens)
        row, slot = (pending & seen & rows[:, None]).nonzero(as_tuple=True)
        if not len(row):
            return
        position, device = self.at[row, slot], self.states.device
        k, v = self.project(layer, self.states[row.to(device), slot.to(device)], position.to(device))
        for store in ring.stores():
            write_at(store, row, position, self.place, k, v)
        pending[row, slot] = False
        self.waiting[layer] = bool(pending.any())
        self._count(flushed=len(row))

    def _count(self, deferred: int = 0, flushed: int = 0) -> None:
        self.counts = Projected(self.counts.deferred + deferred, self.counts.flushed + flushed)

    def crop(self, place: Tensor) -> None:
        """Forget tokens at positions place [B] and later."""
        self.pending &= self.at < place[:, None]

    def emptied(self) -> Deferred:
        """The same with nothing waiting, for rings that were resized."""
        return Deferred(self.rings, self.dim, self.project, self.counts)

    @torch.inference_mode(False)
    def rows(self, index: Tensor, rings: Sequence[HeadCache]) -> Deferred:
        """The same for rows index of the batch, which these rings hold."""
        other = Deferred(rings, self.dim, self.project, self.counts)
        other.states.copy_(self.states[index.to(self.states.device)])
        other.at.copy_(self.at[index])
        other.pending.copy_(self.pending[:, index])
        other.waiting = list(self.waiting)
        return other
