"""Choose an exit threshold with a guarantee: Learn then Test.

Learn then Test (Angelopoulos, Bates, Candès, Jordan, Lei, 2021), https://arxiv.org/abs/2110.01052
Confident Adaptive Language Modeling (Schuster et al., 2022), §3.3. https://arxiv.org/abs/2207.07061

    for thresholds λ_1 > λ_2 > …, fixed beforehand:    p_j = a p-value of "the risk at λ_j exceeds δ"
    accept λ_j while p_j ≤ ε, and stop at the first that fails

The last accepted threshold has a risk of at most δ with probability at least 1 − ε over the calibration prompts. They
must be independent, and must not have trained the exits. Tests in a fixed sequence need no correction for their number.

    Hoeffding–Bentkus   p = min(exp(−n · h(min(r, δ), δ)), e · P(Bin(n, δ) ≤ ⌈n r⌉)) for losses in 0 … 1, mean r
                        h(a, b) = a ln(a / b) + (1 − a) ln((1 − a) / (1 − b))
    binomial            p = P(Bin(n, δ) ≤ n r), exact for losses that are 0 or 1

No torch here. Losses are one number per prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEVER = math.inf
"""the threshold that no confidence reaches: every token runs through all layers"""


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) ≤ k)."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    logs = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(k + 1)
    ]
    largest = max(logs)
    return min(1.0, math.exp(largest) * math.fsum(math.exp(each - largest) for each in logs))


def p_value(losses: Sequence[float], delta: float) -> float:
    """A p-value of the hypothesis that the mean of the losses' distribution exceeds delta. losses: each in 0 … 1."""
    _check(losses, delta)
    n, total = len(losses), math.fsum(losses)
    if all(loss in (0, 1) for loss in losses):
        return binomial_cdf(round(total), n, delta)
    mean = min(total / n, delta)
    hoeffding = math.exp(-n * _relative_entropy(mean, delta))
    # rounding must not turn n · r into the next whole number
    return min(hoeffding, math.e * binomial_cdf(math.ceil(total - 1e-9), n, delta), 1.0)


def _relative_entropy(a: float, b: float) -> float:
    left = a * math.log(a / b) if a else 0.0
    return left + ((1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0)


def choose(thresholds: Sequence[float], losses: Sequence[Sequence[float]], delta: float, epsilon: float) -> float:
    """The lowest threshold that fixed-sequence testing accepts; NEVER if it accepts none.

    thresholds: descending. losses: for each threshold, one loss per prompt.
    """
    if len(thresholds) != len(losses) or list(thresholds) != sorted(thresholds, reverse=True):
        raise ValueError(
            f"thresholds are {list(thresholds)} with losses of {len(losses)}; expected descending thresholds, and the "
            "losses of each"
        )
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; expected a probability between 0 and 1")
    found = NEVER
    for threshold, each in zip(thresholds, losses, strict=True):
        if p_value(each, delta) > epsilon:
            break
        found = threshold
    return found


def prompts_needed(delta: float, epsilon: float) -> int:
    """The least number of prompts that can accept a threshold: with losses of 0 only, (1 − delta)^n ≤ epsilon."""
    return math.ceil(math.log(epsilon) / math.log1p(-delta) - 1e-12)


def _check(losses: Sequence[float], delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; expected a tolerated risk between 0 and 1")
    if not losses or not all(0 <= loss <= 1 for loss in losses):
        raise ValueError(f"{len(losses)} losses, or some outside 0 … 1; expected a loss between 0 and 1 of each prompt")
