"""Stop strings while the text is being written, however it is cut into tokens."""

from __future__ import annotations

import random

import pytest

from spanformer.data import Bytes
from spanformer.infer.text import Writer, check_stop


def written(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    writer = Writer(Bytes().detokenizer(), stop)
    pieces = []
    for token in text.encode():
        pieces.append(writer.add(token))
        if writer.stopped:
            break
    return [*pieces, writer.finish()], writer.stopped


@pytest.mark.parametrize("stop", [(), ("ab",), ("aab",), ("aba", "bb"), ("é",), ("abab", "a\n"), ("xyz",)])
def test_text_ends_before_the_first_stop_string(stop):
    draws = random.Random(0)
    for _ in range(300):
        text = "".join(draws.choice("aabé\n") for _ in range(draws.randrange(12)))
        # The one that is complete first ends the text; of those that end together, the one that begins first.
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        pieces, stopped = written(text, stop)
        assert "".join(pieces) == (text[: min(ends)[1]] if ends else text), (text, stop)
        assert stopped == bool(ends)


def test_only_possible_stop_strings_are_held_back():
    assert written("xabc", ("abd", "cd"))[0] == ["x", "", "", "ab", "c"]
    assert written("xé", ())[0] == ["x", "", "é", ""]


@pytest.mark.parametrize(
    "stop, vocab, said",
    [
        (("a", ""), Bytes(), "stop contains an empty string, which would stop at once; expected non-empty strings"),
        ("end", Bytes(), "stop is the string 'end'; expected a list of strings, such as ['end']"),
        (("a",), None, "stop strings need a vocabulary; pass vocab as well"),
    ],
)
def test_bad_stop_strings_are_refused(stop, vocab, said):
    with pytest.raises(ValueError) as error:
        check_stop(stop, vocab)
    assert str(error.value) == said
