"""ETC's second pre-training task (Ainslie et al., 2020, https://arxiv.org/abs/2004.08483): contrastive predictive
coding (van den Oord et al., 2018, https://arxiv.org/abs/1807.03748) of whole sentences.

Some sentences are masked in a text. What their global tokens then hold, guessed from all around, is to be told apart as
what a global token holds that sees the sentence and nothing else:

    loss = mean_s −log( exp(p_s·c_s / √dim) / Σ_t exp(p_s·c_t / √dim) )

p_s: the output of sentence s's global token in the masked text; c_s: of one that reads sentence s alone. The other
masked sentences of the batch are what it is contrasted with.

Shapes: B batch, n tokens, m global tokens, S masked sentences, T tokens of the longest of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spanformer.model.etc import ETC


class Masked(NamedTuple):
    x: Tensor
    """[B, n] the texts, the tokens of the picked sentences replaced"""
    rows: Tensor
    """[S] whose text each picked sentence is of"""
    sentences: Tensor
    """[S] its number there, that of its global token"""
    alone: Tensor
    """[S, T] the tokens of each"""
    padding: Tensor
    """[S, T] bool, True behind the end of a sentence"""


def mask_sentences(
    x: Tensor,
    segments: Tensor,
    share: float,
    mask_id: int,
    *,
    padding: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Masked:
    """Pick each sentence with probability `share`, and at least two of the batch. x and segments [B, n] as `ETC` reads
    them, on the CPU: this prepares a batch, outside of the model."""
    if x.ndim != 2 or x.shape != segments.shape:
        raise ValueError(f"x has shape {list(x.shape)} and segments {list(segments.shape)}; expected [B, n] both")
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; expected the share of sentences to mask, between 0 and 1")
    real = segments >= 0 if padding is None else (segments >= 0) & ~padding
    row = torch.arange(len(x))[:, None].expand_as(x)
    there = torch.stack((row[real], segments[real]), 1).unique(dim=0)  # [sentences, 2]
    if len(there) < 2:
        raise ValueError(
            f"the batch has {len(there)} sentences; expected at least 2, as each is contrasted with others"
        )
    chance = torch.rand(len(there), generator=generator)
    least = chance.kthvalue(2).values
    picked = there[chance <= least.clamp(min=share)]
    hidden = torch.zeros_like(real)
    tokens = []
    for text, sentence in picked.tolist():
        its = (segments[text] == sentence) & real[text]
        hidden[text] |= its
        tokens.append(x[text, its])
    lengths = torch.tensor([len(t) for t in tokens])
    alone = pad_sequence(tokens, batch_first=True, padding_value=mask_id)
    ended = torch.arange(alone.shape[1]) >= lengths[:, None]
    return Masked(x.masked_fill(hidden, mask_id), picked[:, 0], picked[:, 1], alone, ended)


def predict_sentences(etc: ETC, guessed: Tensor, masked: Masked, top: Tensor) -> Tensor:
    """The loss: guessed [B, m, dim], the global tokens' output for masked.x; top [B, m] their ids."""
    rows, sentences = masked.rows, masked.sentences
    kinds = top[rows, sentences][:, None]  # [S, 1]: the same kind of global token
    codes = etc(masked.alone, torch.zeros_like(masked.alone), kinds, padding=masked.padding).top[:, 0]
    return nce(guessed[rows, sentences], codes)


def nce(predicted: Tensor, codes: Tensor) -> Tensor:
    """predicted and codes [S, dim] → a scalar, log S for guesses that know nothing."""
    if predicted.shape != codes.shape or predicted.ndim != 2 or len(predicted) < 2:
        raise ValueError(
            f"predicted has shape {list(predicted.shape)} and codes {list(codes.shape)}; expected one [S, dim], S at "
            "least 2: each code is contrasted with the others"
        )
    scores = predicted @ codes.mT / predicted.shape[1] ** 0.5
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
