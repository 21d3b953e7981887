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

import numpy as np
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


class Waiting(NamedTuple):
    """Tokens that wait."""

    row: np.ndarray
    slot: np.ndarray
    """[m] each"""
    states: Tensor
    """[m, dim]"""
    positions: Tensor
    """[m]"""


class Deferred:
    """For layers whose memories are rings. A row's tokens wait until the row itself needs them."""

    def __init__(
        self, rings: Sequence[HeadCache], dim: int, project: ProjectAt, counts: Projected | None = None
    ) -> None:
        """rings: of each layer; they share `place`. Slots are counted by NumPy, whose calls take a fifth of the time of
        torch's, and a deep token makes some for every layer."""
        self.rings, self.dim, self.project = list(rings), dim, project
        self.counts = counts or Projected(0, 0)
        self.sinks = max(ring.sink_tokens for ring in rings)
        self.ring = max(max(ring.store.capacities) for ring in rings)
        self.reach = [max(ring.reach) for ring in rings]
        batch, slots = rings[0].batch, self.sinks + self.ring
        with torch.inference_mode(False):  # so that both modes can write to it
            self.states = torch.zeros(batch, slots, dim, dtype=rings[0].dtype, device=rings[0].device)
        self.at = np.full((batch, slots), -1)
        """[B, S] positions, of slots that wait"""
        self.pending = np.zeros((len(rings), batch, slots), dtype=bool)
        self.waiting = [False] * len(rings)
        """[L] whether any token may wait for a layer"""
        self._latest: Waiting | None = None

    @property
    def place(self) -> np.ndarray:
        return self.rings[0].place.numpy()

    def bytes(self) -> int:
        return self.states.numel() * self.states.element_size() + self.at.nbytes + self.pending.nbytes

    def defer(self, states: Tensor, taken: Tensor, real: Tensor | None) -> None:
        """After a pass of T new tokens, before `place` advances: their states [B, T, dim] and the layers [B, T] they
        ran through. Layers above the deepest token of a row have stored nothing. real [B]: as in `Step`."""
        layers, deepest = len(self.rings), taken.amax(1).cpu().numpy()
        if deepest.min() == layers and not any(self.waiting):
            return
        count = np.full_like(self.place, states.shape[1]) if real is None else real.numpy()
        row, column, slot, position = self._slots_of(states.shape[1], count)
        to = [torch.from_numpy(i).to(states.device) for i in (row, column, slot)]
        self.states[to[0], to[2]] = states[to[0], to[1]].to(self.states.dtype)
        self.at[row, slot], self._latest = position, None
        skipped = np.arange(layers)[:, None] >= deepest[row]
        self.pending[:, row, slot] = skipped  # what was there before is out of reach
        self.waiting = [was or bool(now.any()) for was, now in zip(self.waiting, skipped, strict=True)]
        self._count(deferred=int(((layers - deepest) * count).sum()))

    def _slots_of(self, new: int, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Row, column, slot and position [m] of the first count [B] of `new` tokens, of those that have a slot."""
        token = np.arange(new)
        position = self.place[:, None] + token
        early = position < self.sinks
        row, column = ((token < count[:, None]) & (early | (token >= count[:, None] - self.ring))).nonzero()
        slot = np.where(early, position, self.sinks + position % self.ring)
        return row, column, slot[row, column], position[row, column]

    def flush(self, layer: int, active: Tensor | None, new: int) -> None:
        """Before tokens attend in a layer: store what they will see. active [N]: as in `View`, of T = new tokens."""
        if not self.waiting[layer]:
            return
        place = self.place
        rows = np.ones(len(place), dtype=bool)
        if active is not None:
            rows[:] = False
            rows[active.cpu().numpy() // new] = True
        self._store(layer, place - self.reach[layer] + 1, rows)

    @torch.inference_mode()
    def settle(self) -> None:
        """Store everything that waits and that a ring has room for."""
        for n, ring in enumerate(self.rings):
            first = self.place - max(ring.store.capacities)
            self._store(n, first, np.ones(len(first), dtype=bool))
            self.pending[n], self.waiting[n] = False, False

    def _store(self, layer: int, first: np.ndarray, rows: np.ndarray) -> None:
        """Store what rows [B] bool have waiting for a layer from positions first [B] on, and sink tokens."""
        ring, pending = self.rings[layer], self.pending[layer]
        seen = (self.at >= first[:, None]) | (self.at < ring.sink_tokens)
        row, slot = (pending & seen & rows[:, None]).nonzero()
        if not len(row):
            return
        tokens = self._tokens(row, slot)
        k, v = self.project(layer, tokens.states, tokens.positions)
        for store in ring.stores():
            write_at(store, row, self.at[row, slot], self.place, k, v)
        pending[row, slot] = False
        self.waiting[layer] = bool(pending.any())
        self._count(flushed=len(row))

    def _tokens(self, row: np.ndarray, slot: np.ndarray) -> Waiting:
        """These tokens; mostly those that the layer before has just stored."""
        held = self._latest
        if held is None or not (np.array_equal(row, held.row) and np.array_equal(slot, held.slot)):
            device = self.states.device
            states = self.states[torch.from_numpy(row).to(device), torch.from_numpy(slot).to(device)]
            positions = torch.from_numpy(self.at[row, slot]).to(device)
            self._latest = held = Waiting(row, slot, states, positions)
        return held

    def _count(self, deferred: int = 0, flushed: int = 0) -> None:
        self.counts = Projected(self.counts.deferred + deferred, self.counts.flushed + flushed)

    def crop(self, place: Tensor) -> None:
        """Forget tokens at positions place [B] and later."""
        self.pending &= self.at < place.numpy()[:, None]

    def emptied(self) -> Deferred:
        """The same with nothing waiting, for rings that were resized."""
        return Deferred(self.rings, self.dim, self.project, self.counts)

    @torch.inference_mode(False)
    def rows(self, index: Tensor, rings: Sequence[HeadCache]) -> Deferred:
        """The same for rows index of the batch, which these rings hold."""
        other = Deferred(rings, self.dim, self.project, self.counts)
        other.states.copy_(self.states[index.to(self.states.device)])
        other.at[:], other.pending[:] = self.at[index], self.pending[:, index]
        other.waiting = list(self.waiting)
        return other
