"""Masked tokens as in BERT (Devlin et al., 2018), https://arxiv.org/abs/1810.04805, section 3.1.

In every row a share of the tokens is to be predicted. Of these, 80 % are replaced by the mask token, 10 % by a random
token, and 10 % stay unchanged, so that an unmasked token may be wrong too. Every row has the same number.

For ETC's contrastive task (model/cpc.py) whole segments, such as sentences, are masked as well.
Shapes: B rows, T tokens of a row, N of them predicted; P masked segments of a row, S tokens of the longest.
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
    """[B, N] int64, ascending: positions to predict"""
    y: np.ndarray
    """[B, N] int64, the original tokens there"""


def mask_tokens(
    ids: np.ndarray, share: float, *, vocab: int, mask: int, seeds: Sequence[Sequence[int]]
) -> MaskedBatch:  # fmt: skip
    """Mask a share of ids [B, T]. vocab: size of the text's vocabulary; seeds: one per row, which fixes its mask."""
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


@dataclass(frozen=True)
class HiddenSegments:
    x: np.ndarray
    """[B, T] int64, what the model sees"""
    picked: np.ndarray
    """[B, P] int64, ascending: the masked segments"""
    alone: np.ndarray
    """[B, P, S] int64, the tokens of each"""
    alone_padding: np.ndarray
    """[B, P, S] bool, True after the end of a segment"""


def mask_segments(
    ids: np.ndarray, segments: np.ndarray, share: float, *, mask: int, seeds: Sequence[Sequence[int]],
    seen: np.ndarray | None = None,
) -> HiddenSegments:  # fmt: skip
    """Mask whole segments. ids [B, T]; segments [B, T]: index of each token's segment, −1 for none. P is a share of the
    fewest segments in a row, at least two, since each is contrasted with others. seen [B, T]: ids with tokens already
    masked, for x; seeds: one per row, which fixes its mask."""
    if ids.ndim != 2 or ids.shape != segments.shape:
        raise ValueError(f"ids has shape {list(ids.shape)} and segments {list(segments.shape)}; expected [B, T] both")
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; expected the share of segments to mask, between 0 and 1")
    there = [np.unique(row[row >= 0]) for row in segments]
    fewest = min(map(len, there), default=0)
    if fewest < 2:
        raise ValueError(f"a row has {fewest} segments; expected 2 or more, as each is contrasted with others")
    count = min(max(2, round(share * fewest)), fewest)
    picked = np.stack([
        np.sort(np.random.default_rng([*seed, 1]).permutation(numbers)[:count])
        for numbers, seed in zip(there, seeds, strict=True)
    ])  # fmt: skip
    its = segments[:, None] == picked[..., None]  # [B, P, T]
    lengths = its.sum(-1)
    ended = np.arange(lengths.max()) >= lengths[..., None]
    alone = np.full(ended.shape, mask, np.int64)
    alone[~ended] = np.broadcast_to(ids[:, None], its.shape)[its]
    x = np.where(its.any(1), mask, ids if seen is None else seen)
    return HiddenSegments(x.astype(np.int64), picked.astype(np.int64), alone, ended)
