"""Key to door, after Mesnard et al. (2021), https://arxiv.org/abs/2011.09464: the first room decides what the last step
pays.

    key room, 4 steps   →   empty room, `length` steps   →   door room, at most 4 steps

The agent enters each room of 3 × 3 cells in the same corner; its object lies in any other cell, and that of the empty
room is worth nothing. The door ends the episode and pays 1 if the key was taken. All else pays 0, and the door room
does not show who has the key. Walks of random steps succeed in about 6 of 100 episodes.

Shapes: N rows.
"""

from __future__ import annotations

import numpy as np

from spanformer.rl.envs.batch import Rows, Step

SIDE, STEPS = 3, 4
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])
KEY, EMPTY, DOOR = range(3)


class KeyToDoor(Rows):
    observation, actions = 3 + 4 * SIDE, 4
    state = "time", "place", "thing", "has_key"

    def __init__(self, rows: int, length: int = 50) -> None:
        super().__init__("key_to_door", rows, length)
        self.time = np.zeros(rows, np.int64)
        self.place, self.thing = np.zeros((rows, 2), np.int64), np.zeros((rows, 2), np.int64)
        self.has_key = np.zeros(rows, bool)

    def see(self) -> np.ndarray:
        """[N, 3 + 4 · SIDE], one-hot: room; row and column of the agent; those of the object, 0 once the key is
        taken."""
        room, cells = self.room(), np.eye(SIDE)
        gone = (room == KEY) & self.has_key
        thing = np.concatenate([cells[self.thing[:, 0]], cells[self.thing[:, 1]]], 1) * ~gone[:, None]
        parts = [np.eye(3)[room], cells[self.place[:, 0]], cells[self.place[:, 1]], thing]
        return np.concatenate(parts, 1).astype(np.float32)

    def room(self) -> np.ndarray:
        """[N]"""
        return np.where(self.time < STEPS, KEY, np.where(self.time < STEPS + self.length, EMPTY, DOOR))

    def step(self, action: np.ndarray) -> Step:
        room = self.room()
        self.place = np.clip(self.place + MOVES[action], 0, SIDE - 1)
        there = (self.place == self.thing).all(1)
        self.has_key = self.has_key | (there & (room == KEY))
        self.time = self.time + 1
        opened = there & (room == DOOR)
        right = opened & self.has_key
        over = opened | (self.time == 2 * STEPS + self.length)
        self._place((self.room() != room) & ~over)
        return self._end(right.astype(np.float32), over, np.zeros(self.rows, bool), right)

    def _begin(self, which: np.ndarray) -> None:
        self.time = np.where(which, 0, self.time)
        self.has_key = self.has_key & ~which
        self._place(which)

    def _place(self, which: np.ndarray) -> None:
        """Let the agent of these rows enter a room."""
        cell = self.random.integers(1, SIDE * SIDE, self.rows)
        self.place[which] = 0
        self.thing[which] = np.stack([cell // SIDE, cell % SIDE], 1)[which]
