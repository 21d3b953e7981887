"""Streams of tokens: every row of a batch continues where the same row of the previous batch ended.

Shapes: B rows of this process, T tokens of a block, N tokens in all, n = ⌊N / lanes⌋ tokens of one lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spanformer.core.checks import whole_number

LAST_EPOCH = (1 << 31) - 1


@dataclass(frozen=True)
class Batch:
    x: np.ndarray
    """[B, T] int64"""
    y: np.ndarray
    """[B, T] int64, the token that follows each x"""
    reset: bool
    """whether the streams restart, so that the model's state of the previous batch must be dropped"""
    starts: np.ndarray
    """[B] int64, the place in the text of each row's first x"""


@dataclass(frozen=True)
class Scored:
    x: np.ndarray
    """[B, T] int64"""
    y: np.ndarray
    """[B, T] int64, the token that follows each x"""
    counted: np.ndarray
    """[B, T] bool: False where a lane has ended, and x and y are padding"""
    reset: bool
    """True for the first batch only"""
    starts: np.ndarray
    """[B] int64, the place in the text of each row's first x"""


class Lanes:
    """Endless batches for training, from `lanes` contiguous streams; lane r is ids[r·n : (r + 1)·n].

    At their end the lanes restart, at an offset below T sampled from (seed, epoch), so that block boundaries differ
    between epochs. `rows`: the lanes of this process, where several processes share them; the tokens of a lane do not
    depend on it.
    """

    def __init__(self, ids: np.ndarray, lanes: int, block: int, *, seed: int = 0, rows: slice | None = None) -> None:
        _check_sizes(lanes, block)
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more")
        self.length = len(ids) // lanes
        if self.length < block + 1:
            raise ValueError(
                f"{len(ids)} tokens are too few for {lanes} lanes with blocks of {block}, which need "
                f"{lanes * (block + 1)}; use more text, fewer lanes or a shorter block"
            )
        self.rows = range(lanes)[rows or slice(None)]
        if not self.rows:
            raise ValueError(f"rows {rows} selects none of {lanes} lanes")
        self.ids, self.lanes, self.block, self.seed = ids, lanes, block, seed
        self.epoch = self.position = 0

    def __iter__(self) -> Lanes:
        return self

    def __next__(self) -> Batch:
        if self.position + self.block + 1 > self.length:
            self.epoch += 1
            self.position = self._first_position()
        reset = self.position == self._first_position()
        starts = [row * self.length + self.position for row in self.rows]
        windows = np.stack([self.ids[start : start + self.block + 1] for start in starts]).astype(np.int64)
        self.position += self.block
        x, y = (np.ascontiguousarray(part) for part in (windows[:, :-1], windows[:, 1:]))
        return Batch(x, y, reset, np.array(starts))

    def state(self) -> dict[str, int]:
        """Position and shape of the streams, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, **self._shape()}

    def load(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken."""
        self.epoch, self.position = saved_place(state, self._shape(), self.length)

    def _shape(self) -> dict[str, int]:
        return {"tokens": len(self.ids), "lanes": self.lanes, "block": self.block, "seed": self.seed}

    def _first_position(self) -> int:
        """First position of this epoch. In short lanes the offset leaves room for one block."""
        if not self.epoch:
            return 0
        offsets = min(self.block, self.length - self.block)
        return int(np.random.default_rng([self.seed, self.epoch]).integers(offsets))


def saved_place(state: dict[str, int], shape: dict[str, int], last: int) -> tuple[int, int]:
    """(epoch, position) of a saved stream; raises for another shape or a position beyond `last`."""
    for name, ours in shape.items():
        if state.get(name) != ours:
            raise ValueError(f"the saved stream has {name} {state.get(name)}; expected {ours}, as in this run")
    epoch = whole_number("lanes.epoch", state.get("epoch"), 0, LAST_EPOCH)
    return epoch, whole_number("lanes.position", state.get("position"), 0, last)


def every_token(ids: np.ndarray, lanes: int, block: int) -> Iterator[Scored]:
    """Batches for evaluation, in which every token but the very first is predicted exactly once.

    Each lane predicts a contiguous part; its first input is the token before the part. Parts differ in length by at
    most one; shorter lanes end with padding, which is not counted.
    """
    _check_sizes(lanes, block)
    if len(ids) < 2:
        raise ValueError(f"{len(ids)} tokens leave nothing to predict; expected at least 2")
    bounds = [(len(ids) - 1) * lane // lanes for lane in range(lanes + 1)]  # of x; y is shifted by one
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    for done in range(0, longest, block):
        x, y = np.zeros((2, lanes, block), np.int64)
        counted = np.zeros((lanes, block), bool)
        for lane in range(lanes):
            start = bounds[lane] + done
            taken = min(bounds[lane + 1] - start, block)
            if taken > 0:
                x[lane, :taken] = ids[start : start + taken]
                y[lane, :taken] = ids[start + 1 : start + taken + 1]
                counted[lane, :taken] = True
        yield Scored(x, y, counted, done == 0, np.array(bounds[:-1]) + done)


def _check_sizes(lanes: int, block: int) -> None:
    for name, value in (("lanes", lanes), ("block", block)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
