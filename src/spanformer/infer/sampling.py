"""Sampling: from logits to the next token.

    repetition   a logit of a token that came before is divided by the penalty if positive, else multiplied by it
                 (Keskar et al., CTRL, 2019, https://arxiv.org/abs/1909.05858)
    temperature  logits / temperature; at 0 the likeliest token is taken, the first one of a tie
    top_k        the k likeliest tokens, and those tied with the last of them
    top_p        the fewest likeliest tokens whose probabilities sum to p or more
                 (Holtzman et al., 2019, https://arxiv.org/abs/1904.09751)
    min_p        tokens at least p times as likely as the likeliest (Nguyen et al., 2024, https://arxiv.org/abs/2407.01082)

They are applied in this order; each removes tokens before the next computes probabilities.
Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    """divide logits by this; 0: always the likeliest token, below 1: sharper, above 1: more random"""
    top_k: int = 0
    """sample from this many likeliest tokens; 0: all"""
    top_p: float = 1.0
    """sample from the likeliest tokens that together have this probability; 1: all"""
    min_p: float = 0.0
    """drop tokens less than this times as likely as the likeliest; 0: none"""
    repetition: float = 1.0
    """penalty above 1 makes recent tokens less likely; 1: no penalty"""
    repetition_window: int = 64
    """number of last tokens that the penalty applies to, prompt included"""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0, "a number of tokens, or 0 for all")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a probability above 0, up to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a share of the likeliest token's probability, 0 … 1")
        _check("repetition", self.repetition, 1e-3 <= self.repetition <= 1e3, "0.001 … 1,000; 1 is no penalty")
        _check("repetition_window", self.repetition_window, self.repetition_window > 0, "1 or more tokens")


def _check(name: str, value: float, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"{name} is {value}; expected {expected}")


class Repeats:
    """Counts [B, V] of each token among the last ones of each row, updated token by token."""

    def __init__(self, rows: int, vocab: int, window: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, vocab, dtype=torch.int64, device=device)
        self.window = window
        self._recent: list[deque[int]] = [deque() for _ in range(rows)]

    def add(self, row: int, tokens: Sequence[int]) -> None:
        recent = self._recent[row]
        recent.extend(tokens)
        self._count(row, tokens, 1)
        self._count(row, [recent.popleft() for _ in range(len(recent) - self.window)], -1)

    def keep(self, rows: list[int]) -> None:
        """Select rows, in this order."""
        self.counts = self.counts[rows]
        self._recent = [self._recent[row] for row in rows]

    def _count(self, row: int, tokens: Sequence[int], by: int) -> None:
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.counts.device)
        self.counts[row].scatter_add_(0, ids, torch.full_like(ids, by))


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Penalise repeated tokens in logits [B, V]; seen [B, V] bool: tokens that came before."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """−∞ for all but the k largest of each row."""
    if not 0 < k < logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """−∞ for all but the fewest likeliest whose probabilities sum to p or more; of a tie, the first ones stay."""
    if p >= 1:
        return logits
    ordered, order = logits.double().sort(descending=True, stable=True)
    probability = ordered.softmax(-1)
    enough = probability.cumsum(-1) - probability >= p  # the tokens before it already suffice
    enough[:, 0] = False
    return logits.masked_fill(torch.zeros_like(enough).scatter(1, order, enough), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """−∞ for tokens with less than p times the largest probability."""
    if p <= 0:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """[B] tokens by inverse transform sampling: where the cumulative probability passes `uniform` [B], in [0, 1).

    One number per row, so rows are independent. A logit of −∞ is never chosen.
    """
    running = logits.double().softmax(-1).cumsum(-1)
    total = running[:, -1]
    at = torch.minimum(uniform.to(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, at[:, None], right=True)[:, 0]


def choose(logits: Tensor, sampling: Sampling, seen: Tensor | None, randoms: Iterable[torch.Generator]) -> Tensor:
    """[B] tokens from logits [B, V]; seen [B, V] bool for the repetition penalty; one random generator per row.

    At any temperature above 0, each row consumes one random number, whatever the other settings.
    """
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if seen is not None:
        logits = penalise(logits, seen, sampling.repetition)
    if not sampling.temperature:
        return logits.argmax(-1)
    logits = logits - logits.amax(-1, keepdim=True)  # no overflow at any temperature
    # float64, because float32 rounds a temperature below 1e-45 to 0, and 0 / 0 is NaN
    logits = keep_top_k(logits.double() / sampling.temperature, sampling.top_k)
    logits = keep_min_p(keep_top_p(logits, sampling.top_p), sampling.min_p)
    uniform = torch.cat([torch.rand(1, generator=random, dtype=torch.float64) for random in randoms])
    return draw(logits, uniform.to(logits.device))
