"""Pairs of every pattern, against counting one by one from the definition."""

from __future__ import annotations

import itertools

import pytest

from spanformer.cost import pairs as formulas
from spanformer.kinds import KINDS
from support.definitions import DEFINITIONS, HALVES, NUMBERS, params, sees

LENGTHS = (1, 2, 7, 16, 29, 40)


def count(name, n, causal, numbers):
    seen = sees(name, causal)
    return sum(1 for i in range(n) for j in range(n) if seen(n, i, j, *numbers))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_pairs_equal_counting(name, causal):
    pairs = KINDS[name].cost.pairs
    assert pairs is not None
    for numbers in NUMBERS.get(name, [()]):
        for n in LENGTHS:
            assert pairs(n, causal, params(name, numbers)) == count(name, n, causal, numbers), (n, numbers)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name, numbers", [("strided_heads", (5,)), ("fixed_heads", (5, 2)), ("fixed_heads", (4, 4))])
def test_heads_of_two_kinds_count_on_average(name, numbers, causal):
    pairs = KINDS[name].cost.pairs
    assert pairs is not None
    for n in LENGTHS:
        halves = [sum(1 for i in range(n) for j in range(n) if (j <= i or not causal) and half(n, i, j, *numbers))
                  for half in HALVES[name]]  # fmt: skip
        assert pairs(n, causal, params(name, numbers)) == sum(halves) / 2, n


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name not in ("dynamic_span", "expire_span")])
def test_cache_holds_what_later_tokens_still_see(name):
    """Keys that some query at n or after it sees; a window's cache also holds the newest token, whose turn is over."""
    cached = KINDS[name].cost.cached
    assert cached is not None
    for numbers in NUMBERS.get(name, [()]):
        for n in (7, 16, 29):
            whole = 3 * n + 60
            seen = sum(any(sees(name, True)(whole, i, j, *numbers) for i in range(n, whole)) for j in range(n))
            assert seen <= min(n, cached(n, params(name, numbers))), (n, numbers)


def big_bird(n, causal, size, near, g, drawn):
    """Every block row with sets of blocks, the drawn ones the nearest that are whole and not there already."""
    total, rows = 0, -(-n // size)
    side = near // 2
    for i in range(n):
        row = i // size
        allowed = [c for c in range(rows) if not causal or c <= row]
        seen = {c for c in allowed if c < g or row < g or (abs(row - c) <= side)}
        left = [c for c in allowed if c not in seen and (c + 1) * size <= n]
        seen |= set(left[:drawn])
        total += sum(1 for j in range(n) if j // size in seen and (not causal or j <= i))
    return total


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("numbers", [(1, 3, 1, 2), (4, 3, 2, 3), (3, 1, 0, 1), (4, 5, 0, 0), (8, 3, 1, 9)])
def test_big_bird_by_block_rows(causal, numbers):
    pairs = KINDS["big_bird"].cost.pairs
    assert pairs is not None
    for n in LENGTHS:
        assert pairs(n, causal, params("big_bird", numbers)) == big_bird(n, causal, *numbers), n


def test_random_and_etc():
    drawn, etc = formulas.random, formulas.etc
    assert drawn(10, True, 3) == sum(min(3, i + 1) for i in range(10)) and drawn(10, False, 30) == 100
    n, s, r = 11, 4, 2
    tokens = [("g", i) for i in range(3)] + [("l", i) for i in range(n)]
    for hard in (0, 1):
        seen = 0
        for (a, i), (b, j) in itertools.product(tokens, tokens):
            near, own = abs(i - j) <= r, i == j // s
            seen += {"ll": near, "lg": True, "gg": True, "gl": own or not hard}[a + b]
        assert etc(n, False, r, s, 12, hard) == seen
    with pytest.raises(ValueError, match="etc needs the whole text"):
        etc(n, True, r, s, 12, 0)


@pytest.mark.parametrize("itself", [True, False])
def test_pairs_of_even_buckets_equal_counting(itself):
    for n, count_, w in itertools.product(LENGTHS, (1, 4, 7), (1, 3, 50)):
        first, mine = 0 if itself else 1, [(i, j) for i in range(n) for j in range(i + 1) if (i - j) % count_ == 0]
        seen = sum(1 for i, j in mine if first <= (i - j) // count_ < w + first)
        assert formulas.buckets(n, count_, w, itself=itself) == seen, (n, count_, w)
