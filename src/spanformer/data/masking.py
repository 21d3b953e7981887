"""Tokens hidden for a model to guess. BERT (Devlin et al., 2018), https://arxiv.org/abs/1810.04805, section 3.1.

Of every row a share of the tokens is asked for; of these, 80 % are replaced by the mask, 10 % by any token, and 10 %
stay as they are, so that a model cannot trust a token for not being the mask. Every row has equally many.
Shapes: B rows, T tokens of a row, N of them asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REPLACED, SHUFFLED = 0.8, 0.1


@dataclass(frozen=True)
class MaskedBatch:
    x: np.ndarray
    """[B, T] int64, what the model sees"""
    at: np.ndarray
    """[B, N] int64, rising: the places asked for"""
    y: np.ndarray
    """[B, N] int64, what stood there"""


def mask_tokens(
    ids: np.ndarray, share: float, *, vocab: int, mask: int, seeds: Sequence[Sequence[int]]
) -> MaskedBatch:  # fmt: skip
    """ids [B, T]; vocab: how many tokens the text has; seeds: one for each row, which decides all about it."""
    rows, length = ids.shape
    asked = max(1, round(share * length))
    x, at = ids.astype(np.int64), np.empty((rows, asked), np.int64)
    for row, seed in enumerate(seeds):
        draw = np.random.default_rng(list(seed))
        at[row] = np.sort(draw.permutation(length)[:asked])
        kind, other = draw.random(asked), draw.integers(0, vocab, asked)
        seen = np.where(kind < REPLACED, mask, np.where(kind < REPLACED + SHUFFLED, other, x[row, at[row]]))
        x[row, at[row]] = seen
    return MaskedBatch(x, at, np.take_along_axis(ids, at, 1).astype(np.int64))
