"""Batches of recorded steps: windows of K steps, or segments of whole episodes with memory between them.

window    a step of the data, every one as probable, and up to K − 1 that follow it; padding on the left
episode   each row runs through episodes, drawn at random, one after the other, K steps at a time

Shapes: B rows, K steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanformer.rl.decision import Steps
from spanformer.rl.trajectories import Trajectories


class Recorded:
    """Episodes as tensors."""

    def __init__(self, data: Trajectories) -> None:
        self.data = data
        self.ends = np.repeat(data.starts + data.lengths, data.lengths)
        """[S] the step after the last of each step's episode"""

    def steps(self, index: np.ndarray, padding: np.ndarray, episode: np.ndarray | None = None) -> Steps:
        """The steps of these indices [B, K] into the data; padded ones are read and must be masked."""
        d, at = self.data, torch.from_numpy(index)
        asked, observation, action, time = (
            torch.from_numpy(each)[at] for each in (d.returns_to_go, d.observation, d.action, d.time)
        )
        numbers = None if episode is None else torch.from_numpy(episode)
        return Steps(asked, observation, action, time, torch.from_numpy(padding), numbers)

    def windows(self, random: np.random.Generator, rows: int, length: int) -> Steps:
        """Trajectories are drawn by their length and starts uniformly: each step is as probable a start. No longer than
        the longest episode."""
        length = min(length, int(self.data.lengths.max()))
        first = random.integers(0, self.data.steps, rows)
        count = np.minimum(length, self.ends[first] - first)
        place = np.arange(length)[None] - (length - count)[:, None]  # negative: padding on the left
        return self.steps(first[:, None] + np.maximum(place, 0), place < 0)


class Streams:
    """Rows that run through episodes. `state` is all that the next segment depends on, beside chance."""

    def __init__(self, recorded: Recorded, rows: int) -> None:
        self.recorded = recorded
        self.next = np.zeros(rows, np.int64)
        """[B] index of the next step"""
        self.end = np.zeros(rows, np.int64)
        """[B] index after the episode's last one"""
        self.number = np.full(rows, -1)
        """[B] episodes begun, less 1"""

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in ("next", "end", "number")}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name in ("next", "end", "number"):
            setattr(self, name, tensors[name].numpy().copy())

    def segment(self, random: np.random.Generator, length: int) -> Steps:
        rows, data = len(self.next), self.recorded.data
        index, episode = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
        for k in range(length):
            over = self.next == self.end
            drawn = random.integers(0, len(data), rows)
            self.next = np.where(over, data.starts[drawn], self.next)
            self.end = np.where(over, data.starts[drawn] + data.lengths[drawn], self.end)
            self.number = self.number + over
            index[:, k], episode[:, k] = self.next, self.number
            self.next = self.next + 1
        return self.recorded.steps(index, np.zeros((rows, length), bool), episode)
