"""Each step from logits to a token, against the slow version of its definition."""

from __future__ import annotations

import math

import pytest
import torch

from spanformer.infer.sampling import (
    Repeats,
    Sampling,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
)  # fmt: skip


def some_logits(seed=0):
    logits = 3 * torch.randn(5, 23, generator=torch.Generator().manual_seed(seed))
    logits[1] = 0.0  # all as likely
    logits[2, 4:] = -math.inf
    return logits


def kept(logits):
    return [{n for n, value in enumerate(row) if value > -math.inf} for row in logits.tolist()]


def probabilities(row):
    weights = [math.exp(value) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


@pytest.mark.parametrize("k", [0, 1, 3, 22, 23, 100])
def test_top_k_keeps_the_k_likeliest_and_their_equals(k):
    logits = some_logits()
    for row, found in zip(logits.tolist(), kept(keep_top_k(logits, k)), strict=True):
        least = sorted(row)[-k] if 0 < k < len(row) else -math.inf
        assert found == {n for n, value in enumerate(row) if value >= least and value > -math.inf}


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.77, 0.99, 1.0])
def test_top_p_keeps_the_fewest_likeliest_that_sum_to_p(p):
    logits = some_logits()
    for row, found in zip(logits.tolist(), kept(keep_top_p(logits, p)), strict=True):
        chances = probabilities(row)
        expected, total = set(), 0.0
        for n in sorted(range(len(row)), key=lambda n: (-chances[n], n)):
            if total >= p - 1e-12 or not chances[n]:
                break
            expected.add(n)
            total += chances[n]
        assert found == expected


@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_drops_unlikely_tokens(p):
    logits = some_logits()
    for row, found in zip(logits.tolist(), kept(keep_min_p(logits, p)), strict=True):
        chances = probabilities(row)
        assert found == {n for n, chance in enumerate(chances) if chance and chance >= p * max(chances) * (1 - 1e-6)}


def test_penalty_lowers_positive_and_negative_logits():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    seen = torch.tensor([[True, True, False, False, True]])
    assert penalise(logits, seen, 4.0).tolist() == [[0.5, -8.0, 2.0, -2.0, 0.0]]


def test_repeats_are_counted_in_the_window_alone():
    draws = torch.Generator().manual_seed(0)
    texts, repeats = [[], []], Repeats(2, 7, 5, torch.device("cpu"))
    for length in (1, 0, 3, 1, 20, 1, 4):
        for row in range(2):
            new = torch.randint(7, (length + row,), generator=draws).tolist()
            texts[row] += new
            repeats.add(row, new)
        assert repeats.counts.tolist() == [[text[-5:].count(token) for token in range(7)] for text in texts]
    repeats.keep([1])
    repeats.add(0, [6])
    assert repeats.counts.tolist() == [[[*texts[1][-4:], 6].count(token) for token in range(7)]]


def test_draw_inverts_the_cumulative_probability():
    row = [0.0, math.log(3.0), -math.inf, math.log(4.0), -math.inf]  # probabilities 1/8, 3/8, 0, 4/8, 0
    numbers = [0.0, 0.124, 0.126, 0.499, 0.501, 0.9999, math.nextafter(1.0, 0.0)]
    found = draw(torch.tensor([row] * len(numbers)), torch.tensor(numbers, dtype=torch.float64))
    assert found.tolist() == [0, 0, 1, 1, 3, 3, 3]


def test_draws_come_as_often_as_their_probability_says():
    logits, draws = some_logits()[:1], 40_000
    even = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = torch.bincount(draw(logits.expand(draws, -1), even), minlength=23)
    assert (counts / draws - logits[0].softmax(-1)).abs().max() < 2 / draws


def random(seed=3):
    return torch.Generator().manual_seed(seed)


def test_choose_applies_the_steps_in_documented_order():
    logits, seen = some_logits(4)[:1], torch.zeros(1, 23, dtype=torch.bool)
    seen[0, logits[0].argmax()] = True
    sampling = Sampling(0.7, top_k=9, top_p=0.9, min_p=0.05, repetition=1.5)
    steps = penalise(logits, seen, 1.5) / 0.7
    steps = keep_min_p(keep_top_p(keep_top_k(steps, 9), 0.9), 0.05)
    one, other = random(), random()
    for _ in range(200):
        expected = draw(steps, torch.rand(1, generator=one, dtype=torch.float64))
        assert torch.equal(choose(logits, sampling, seen, [other]), expected)


def test_temperature_0_is_the_likeliest_and_so_is_one_near_0():
    logits = some_logits()
    likeliest = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    assert torch.equal(choose(logits, Sampling(0), None, [random()] * 5), likeliest)
    drawn = choose(logits, Sampling(1e-30), None, [random()] * 5)
    assert torch.equal(logits.gather(1, drawn[:, None]), logits.amax(-1, keepdim=True))


def test_row_draws_the_same_alone_and_among_others():
    logits = some_logits()
    together = choose(logits, Sampling(), None, [random(n) for n in range(5)])
    alone = [choose(logits[n : n + 1], Sampling(), None, [random(n)]) for n in range(5)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected 0 or more"),
        ({"temperature": math.nan}, "temperature is nan; expected 0 or more"),
        ({"top_k": -1}, "top_k is -1; expected a number of tokens, or 0 for all"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a probability above 0, up to 1"),
        ({"top_p": 1.5}, "top_p is 1.5; expected a probability above 0, up to 1"),
        ({"min_p": 2.0}, "min_p is 2.0; expected a share of the likeliest token's probability, 0 … 1"),
        ({"repetition": 0.0}, "repetition is 0.0; expected 0.001 … 1,000; 1 is no penalty"),
        ({"repetition_window": 0}, "repetition_window is 0; expected 1 or more tokens"),
    ],
)
def test_bad_settings_are_refused(wrong, said):
    with pytest.raises(ValueError) as error:
        Sampling(**wrong)
    assert str(error.value) == said
