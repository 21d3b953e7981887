"""Memory chain, after "memory length" of Osband et al. (2020), https://arxiv.org/abs/1908.03568

The first observation shows a bit. After `length` more steps the query flag is set, and the action of that step must
equal the bit: reward 1, or −1 for the other. All other actions change nothing. A policy without memory gets 0.
"""

from __future__ import annotations

import numpy as np

from spanformer.rl.envs.batch import Memory, Step


class MemoryChain(Memory):
    observation, actions = 3, 2

    def __init__(self, rows: int, length: int = 50) -> None:
        super().__init__("memory_chain", rows, length)

    def see(self) -> np.ndarray:
        """[N, 3]: share of the time left, query flag, and ±1 for the bit at time 0, else 0."""
        left = 1 - self.time / self.length
        bit = np.where(self.time == 0, 2 * self.cue - 1, 0)
        return np.stack([left, self.time == self.length, bit], 1).astype(np.float32)

    def step(self, action: np.ndarray) -> Step:
        over = self.time == self.length
        right = action == self.cue
        self.time = np.where(over, self.time, self.time + 1)
        reward = np.where(over, np.where(right, 1.0, -1.0), 0.0)
        return self._end(reward, over, np.zeros(self.rows, bool), right)
