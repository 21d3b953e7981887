"""Scores a text that comes in parts, token by token, in constant memory.

Shapes: n tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from spanformer.infer.counts import check_counts
from spanformer.infer.prompt import checked
from spanformer.model.lm import LM


class Scored(NamedTuple):
    ids: np.ndarray
    """[n] int64, the next tokens of the text"""
    nats: np.ndarray
    """[n] float64, negative log-likelihood of each given all tokens before it"""


def score(model: LM, parts: Iterable[np.ndarray], *, chunk: int = 512) -> Iterator[Scored]:
    """parts: arrays of ids, of any lengths. The first token has no context and counts as a uniform guess."""
    check_counts(chunk=chunk)
    return _score(model, checked(parts, model.config.vocab, "the text"), chunk)


def _score(model: LM, parts: Iterable[np.ndarray], chunk: int) -> Iterator[Scored]:
    device = next(model.parameters()).device
    model.eval()
    before, state = np.empty(0, np.int64), None
    for ids in in_chunks(parts, chunk):
        first = np.empty(0) if len(before) else np.array([math.log(model.config.vocab)])
        text = np.concatenate([before, ids])
        before = text[-1:]
        if len(text) == 1:
            yield Scored(ids, first)
            continue
        x = torch.from_numpy(text)[None].to(device)
        with torch.inference_mode():
            found = model(x[:, :-1], state, targets=x[:, 1:])
        state = found.state
        yield Scored(ids, np.concatenate([first, found.nll[0].double().cpu().numpy()]))


def in_chunks(parts: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same tokens as int64 arrays of `size`, the last one possibly shorter."""
    held = np.empty(0, np.int64)
    for part in parts:
        held = np.concatenate([held, part])
        whole = len(held) - len(held) % size
        if whole:
            yield from held[:whole].reshape(-1, size)
            held = held[whole:]
    if len(held):
        yield held
