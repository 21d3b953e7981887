"""Pairs of texts, generated numbers, and masked tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spanformer.data import Bytes, Chars, DataConfig, Pairs, PairStream, mask_tokens, prepare
from spanformer.data.numbers import numbers, words

LINES = ["12\ttwelve\n", "7\tseven\n", "100\tone hundred\n", "3\t\n", "40\tforty\n"]
BEGIN, END = 300, 301


def pairs(lines: list[str] | None = None, longest: int = 64) -> Pairs:
    ids = Bytes().encode("".join(LINES if lines is None else lines))
    return Pairs(ids, Bytes(), begin=BEGIN, end=END, longest=longest, name="train")


def text(ids: np.ndarray) -> str:
    return "".join({BEGIN: "<", END: ">"}.get(int(i)) or chr(i) for i in ids)


def test_words() -> None:
    known = {
        0: "zero", 9: "nine", 10: "ten", 13: "thirteen", 20: "twenty", 42: "forty-two", 100: "one hundred",
        305: "three hundred five", 1000: "one thousand", 31407: "thirty-one thousand four hundred seven",
        100_000: "one hundred thousand", 999_999: "nine hundred ninety-nine thousand nine hundred ninety-nine",
    }  # fmt: skip
    assert {n: words(n) for n in known} == known
    assert len({words(n) for n in range(0, 1_000_000, 7)}) == len(range(0, 1_000_000, 7))
    with pytest.raises(ValueError, match=r"^number is 1000000; expected 0 … 999,999$"):
        words(1_000_000)


def test_splits_of_numbers_share_nothing() -> None:
    found = numbers()
    assert {split: len(each) for split, each in found.items()} == {"train": 22_000, "valid": 1000, "test": 1000}
    assert len(set().union(*found.values())) == 24_000  # so none is twice, or in two of them
    assert found["test"][:3] == numbers()["test"][:3] == [258686, 464476, 917682]  # on every machine
    for each in found.values():  # numbers of all lengths in each
        assert {len(str(n)) for n in each} >= {2, 3, 4, 5, 6}


def test_numbers_are_a_source(tmp_path: Path) -> None:
    data = prepare(DataConfig("numbers", tokens="char", cache=str(tmp_path)))
    assert data.vocab.decode(data.splits["test"].ids[:30]).startswith("258686\ttwo hundred fifty-eigh")
    found = Pairs(data.splits["valid"].ids, data.vocab, begin=40, end=41, longest=65, name="valid")
    assert len(found) == 1000 and found.tokens == sum(len(words(n)) + 1 for n in numbers()["valid"])
    source, target = (data.vocab.decode(ids) for ids in found.texts(17))
    assert words(int(source)) == target


def test_batch() -> None:
    batch = pairs().batch(np.array([2, 1, 3]))
    assert [text(row) for row in batch.source] == ["100>", "7>>>", "3>>>"]
    assert batch.source_padding.tolist() == [[False] * 4, [False, False, True, True], [False, False, True, True]]
    assert text(batch.x[0]) == "<one hundred" and text(batch.y[0]) == "one hundred>"
    for row, n in ((1, 6), (2, 1)):
        assert not batch.padding[row, :n].any() and batch.padding[row, n:].all()
    assert text(batch.x[1, :6]) == "<seven" and text(batch.y[1, :6]) == "seven>" and text(batch.y[2, :1]) == ">"
    assert batch.tokens == 12 + 6 + 1 == int((~batch.padding).sum())


def test_stream_shows_every_pair_once_an_epoch_and_goes_on_exactly() -> None:
    many = pairs([f"{n}\t{words(n)}\n" for n in range(203)])
    stream = PairStream(many, 10, seed=3)
    seen = []
    for _ in range(20):
        batch = next(stream)
        seen += [text(row[row != END]) for row in batch.source]
        spread = (~batch.padding).sum(1)
        assert spread.max() - spread.min() < 16  # lengths go together
    assert len(set(seen)) == 200
    saved = stream.state()
    assert saved == {"epoch": 0, "position": 20, "pairs": 203, "lanes": 10, "seed": 3}
    after = [next(stream).x for _ in range(25)]
    again = PairStream(many, 10, seed=3)
    again.load(saved)
    for expected in after:
        assert np.array_equal(next(again).x, expected)
    shares = [PairStream(many, 10, seed=3, rows=rows) for rows in (slice(0, 5), slice(5, 10))]
    whole, parts = next(PairStream(many, 10, seed=3)), [next(share) for share in shares]
    assert [text(r[r != END]) for p in parts for r in p.source] == [text(r[r != END]) for r in whole.source]
    assert {part.tokens for part in parts} == {whole.tokens}
    with pytest.raises(ValueError, match=r"^the saved stream has lanes 10; expected 5, as in this run$"):
        PairStream(many, 5, seed=3).load(saved)
    with pytest.raises(ValueError, match=r"^there are 203 pairs to train on; expected at least a batch of 204$"):
        PairStream(many, 204)


def test_line_that_does_not_end_is_left_out() -> None:
    assert len(pairs([*LINES, "99\tninety-n"])) == len(LINES)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["1\tone\n", "two\n"], r"^line 2 of train has 0 tabs; expected two texts with a tab between them$"),
        (["1\tone\tuno\n"], r"^line 1 of train has 2 tabs; expected two texts with a tab between them$"),
        (["1\tone"], r"^train has no line; expected lines of two texts with a tab between them$"),
        (["1\tone\n", "2\t" + "x" * 64 + "\n"], r"^line 2 of train has a text of 65 tokens with its end; train.block "),
    ],
)
def test_bad_lines(lines: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pairs(lines)


def test_vocabulary_without_tabs() -> None:
    vocab = Chars("abc\n")
    with pytest.raises(ValueError, match=r"^the text has no tab; expected lines of two texts with a tab between them$"):
        Pairs(vocab.encode("ab\n"), vocab, begin=9, end=10, longest=9, name="train")


def test_masking() -> None:
    ids = np.random.default_rng(1).integers(0, 50, (400, 100)).astype(np.uint8)
    seeds = [(7, n) for n in range(400)]
    found = mask_tokens(ids, 0.15, vocab=50, mask=50, seeds=seeds)
    assert found.at.shape == found.y.shape == (400, 15) and (np.diff(found.at) > 0).all()
    assert np.array_equal(found.y, np.take_along_axis(ids, found.at, 1))
    asked = np.zeros(ids.shape, bool)
    np.put_along_axis(asked, found.at, True, 1)
    assert np.array_equal(found.x[~asked], ids[~asked])  # what is not asked for stays
    masked, kept = (found.x[asked] == 50).mean(), (found.x[asked] == ids[asked]).mean()
    assert abs(masked - 0.8) < 0.02 and abs(kept - (0.1 + 0.1 / 50)) < 0.02  # 6,000 draws: 4 standard deviations
    counts = np.bincount(found.at.ravel(), minlength=100)
    assert counts.min() > 25 and counts.max() < 105  # 60 expected of each place
    assert np.array_equal(mask_tokens(ids[3:5], 0.15, vocab=50, mask=50, seeds=seeds[3:5]).x, found.x[3:5])
    other = mask_tokens(ids, 0.15, vocab=50, mask=50, seeds=[(8, n) for n in range(400)])
    assert not np.array_equal(other.at, found.at)
    assert mask_tokens(ids[:, :2], 0.15, vocab=50, mask=50, seeds=seeds).at.shape == (400, 1)  # one at least
