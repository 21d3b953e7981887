"""Learn then Test: p-values against published and simulated figures."""

from __future__ import annotations

import math
import random

import pytest

from spanformer.depth.calibrate import NEVER, binomial_cdf, choose, p_value, prompts_needed


def test_binomial_cdf_equals_the_sum() -> None:
    for n, k, p in [(1, 0, 0.3), (10, 3, 0.25), (200, 11, 0.1), (50, 50, 0.9), (5, -1, 0.5)]:
        want = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
        assert binomial_cdf(k, n, p) == pytest.approx(want, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize(
    ("delta", "n", "largest"),
    [(0.1, 100, 0.035), (0.1, 200, 0.055), (0.1, 500, 0.070), (0.25, 100, 0.150), (0.25, 500, 0.208)],
)
def test_hoeffding_bentkus_accepts_the_known_largest_risk(delta: float, n: int, largest: float) -> None:
    below, above = [largest - 1e-3] * n, [largest + 6e-3] * n
    assert p_value(below, delta) <= 0.05 < p_value(above, delta)


def test_losses_of_zero_have_a_p_value() -> None:
    assert p_value([0.0] * 50, 0.1) == pytest.approx(0.9**50)
    assert p_value([0.0, 1e-12] * 25, 0.1) == pytest.approx(0.9**50, rel=1e-6)  # Hoeffding's form at a mean of 0


def test_sequence_stops_at_the_first_failure() -> None:
    good, bad = [0.0] * 100, [0.5] * 100
    assert choose([0.9, 0.8, 0.7, 0.6], [good, good, bad, good], 0.1, 0.05) == 0.8
    assert choose([0.9, 0.8], [bad, good], 0.1, 0.05) == NEVER


@pytest.mark.parametrize("binary", [True, False])
def test_risk_exceeds_delta_rarely(binary: bool) -> None:
    """At a true risk of just delta, an acceptance is an error; its share must not exceed epsilon."""
    draw, delta, n, epsilon, tries = random.Random(0), 0.1, 60, 0.05, 10_000
    wrong = 0
    for _ in range(tries):
        hits = sum(draw.random() < delta for _ in range(n))
        losses = [1.0] * hits + [0.0] * (n - hits)
        if not binary:  # losses within 0 … 1 with the same mean: the tests must take the other bound
            losses = [0.5 * loss + 0.5 * delta for loss in losses]
        wrong += p_value(losses, delta) <= epsilon
    assert wrong <= 0.055 * tries
    assert wrong > 0 or not binary


def test_number_of_prompts_needed() -> None:
    for delta, epsilon in [(0.1, 0.05), (0.25, 0.05), (0.05, 0.01)]:
        n = prompts_needed(delta, epsilon)
        assert p_value([0.0] * n, delta) <= epsilon < p_value([0.0] * (n - 1), delta)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: p_value([], 0.1), "0 losses"),
        (lambda: p_value([1.5], 0.1), "expected a loss between 0 and 1"),
        (lambda: p_value([0.5], 1.0), "delta is 1.0; expected a tolerated risk"),
        (lambda: choose([0.5], [[0.0]], 0.1, 0.0), "epsilon is 0.0; expected a probability"),
        (lambda: choose([0.5, 0.9], [[0.0], [0.0]], 0.1, 0.05), "expected descending thresholds"),
    ],
)
def test_bad_input_is_one_sentence(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
