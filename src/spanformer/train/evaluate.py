"""How well a model predicts a text: every token counted once, read as a stream."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from spanformer.data import every_token
from spanformer.model.lm import LM
from spanformer.train.step import autocast


class Score(NamedTuple):
    nats: float
    """of all tokens together"""
    tokens: int
    units: float
    """bytes, characters or words that the tokens stand for"""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits(self) -> float:
        """Bits per byte, character or word."""
        return self.nats / self.units / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: LM,
    ids: np.ndarray,
    *,
    units: float | None = None,
    lanes: int = 1,
    block: int = 256,
    dtype: str = "float32",
    on_progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Read ids as `lanes` contiguous parts side by side, each with its own memory from its first token on.

    The very first token, which nothing comes before, is counted as a uniform guess. units: how many bytes or
    characters or words the ids stand for; None: one each.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    counted, state = 1, None
    with _not_training(model):
        for part in every_token(ids, lanes, block):
            x, y = (torch.from_numpy(a).to(device) for a in (part.x, part.y))
            mask = torch.from_numpy(part.counted).to(device)
            with autocast(dtype, device):
                found = model(x, None if part.reset else state, targets=y)
            state = found.state
            total += (found.nll.double() * mask).sum()
            counted += int(part.counted.sum())
            if on_progress is not None:
                on_progress(counted, len(ids))
    nats = float(total) + math.log(model.config.vocab)
    return Score(nats, counted, len(ids) if units is None else units)


@torch.no_grad()
def evaluate_as_original(model: LM, ids: np.ndarray, *, block: int, lanes: int = 8) -> Score:
    """The protocol of the adaptive-span paper's code: lanes of equal length, whole blocks only, a mean over blocks.

    Leaves out the tokens that fill no block and every lane's first token.
    """
    device = next(model.parameters()).device
    length = len(ids) // lanes
    if length <= block:
        raise ValueError(
            f"the split has {len(ids):,} tokens; expected more than {lanes} lanes of one block, {lanes * block:,}"
        )
    rows = ids[: lanes * length].reshape(lanes, length)
    total, state = torch.zeros((), dtype=torch.float64, device=device), None
    starts = range(0, length - block, block)
    with _not_training(model):
        for at in starts:
            piece = torch.from_numpy(rows[:, at : at + block + 1].astype(np.int64)).to(device)
            found = model(piece[:, :-1], state, targets=piece[:, 1:])
            state = found.state
            total += found.nll.double().sum()
    tokens = len(starts) * lanes * block
    return Score(float(total), tokens, tokens)


@contextlib.contextmanager
def _not_training(model: LM) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
