"""Passive T-maze, after Bakker (2001) and Ni et al. (2023), https://arxiv.org/abs/2307.03864

    S - - - - - - - J      A cue at S, seen there only, says whether the goal lies up or down of the junction J.
                           Each step before J that does not go right costs 1/length. The right turn gives 1, the
                           wrong one 0; either ends the episode. After 2 (length + 1) steps it is cut.

The best return is 1. A policy without memory gets 0.5.
"""

from __future__ import annotations

import numpy as np

from spanformer.rl.envs.batch import Memory, Step

RIGHT, LEFT, UP, DOWN = range(4)


class TMaze(Memory):
    observation, actions = 4, 4

    def __init__(self, rows: int, length: int = 50) -> None:
        super().__init__("t_maze", rows, length)

    def see(self) -> np.ndarray:
        """[N, 4]: cue up, cue down, in the corridor, at the junction."""
        start, junction = self.place == 0, self.place == self.length
        shown = [start & (self.cue == 1), start & (self.cue == 0), ~start & ~junction, junction]
        return np.stack(shown, 1).astype(np.float32)

    def step(self, action: np.ndarray) -> Step:
        at = self.place == self.length
        turned = at & (action >= UP)
        right = (action == UP) == (self.cue == 1)
        reward = np.where(at, turned & right, (action != RIGHT) * (-1 / self.length))
        moved = self.place + (action == RIGHT) - (action == LEFT)
        self.place = np.where(at, self.place, np.clip(moved, 0, self.length))
        self.time = self.time + 1
        cut = ~turned & (self.time >= 2 * (self.length + 1))
        return self._end(reward, turned, cut, right)
