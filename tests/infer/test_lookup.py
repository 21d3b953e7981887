"""Guesses are what followed the last time the text stood so, and looking them up does not grow with the text."""

from __future__ import annotations

import random

import pytest

from spanformer.infer import lookup
from spanformer.infer.lookup import LENGTHS, Lookup


def guess_slowly(text: list[int], most: int) -> list[int]:
    for length in LENGTHS:
        for at in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[at - length : at] == text[-length:]:
                return (text[at:] * most)[:most]
    return []


@pytest.mark.parametrize("letters", [1, 2, 3])
def test_guesses_are_what_followed_most_recently(letters):
    draws = random.Random(letters)
    text, guesses = [], Lookup()
    guessed = 0
    for _ in range(300):
        new = [draws.randrange(letters) for _ in range(draws.choice([1, 1, 5]))]
        text += new
        guesses.add(new)
        assert guesses.guess(6) == guess_slowly(text, 6)
        guessed += bool(guesses.guess(6))
    assert guessed > 100 and guesses.guess(0) == []


def test_old_text_is_forgotten(monkeypatch):
    monkeypatch.setattr(lookup, "KEPT", 50)
    guesses, draws = Lookup(), random.Random(0)
    text = [draws.randrange(4) for _ in range(350)]
    for n, token in enumerate(text):
        guesses.add([token])
        assert len(guesses._tokens) < 100 and len(guesses._after) < 300
        assert guesses.guess(3) in [guess_slowly(text[max(0, n - last) : n + 1], 3) for last in range(49, 100)]
    guesses.add(text)
    assert guesses._tokens[-50:] == text[-50:]
