"""A stream of facts: every answer follows from one fact, as far back and as rare as asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spanformer.data import DataConfig, prepare
from spanformer.data.tasks import Facts, parse_facts, written
from spanformer.data.tasks.facts import FIRST_FACT


def test_each_answer_follows_from_its_latest_fact() -> None:
    task = Facts(every=50, distance=200)
    tokens, answers = task.draw(np.random.default_rng(0), 100_000)
    places = np.flatnonzero(answers)
    for at in places.tolist():
        fact = int(np.flatnonzero(tokens[: at - 1] == tokens[at - 1])[-1])
        assert tokens[fact + 1] == tokens[at] and 100 <= at - 1 - fact <= 200
    assert np.count_nonzero(tokens >= FIRST_FACT) == 2 * len(places)  # every fact is asked for once
    assert 0.9 * len(tokens) / 50 < len(places) <= len(tokens) / 50
    assert len(set(tokens[places].tolist())) == 32  # all values


@pytest.mark.parametrize(("every", "distance"), [(8, 8), (48, 2000), (1000, 31)])
def test_rate_and_distance_are_those_asked_for(every: int, distance: int) -> None:
    tokens, answers = Facts(every, distance).draw(np.random.default_rng(1), 50_000)
    share = answers.mean() * every
    assert tokens.dtype == np.uint8 and len(tokens) == len(answers) == 50_000
    assert (0.6 if every == 8 else 0.85) < share <= 1


def test_facts_are_a_source(tmp_path: Path) -> None:
    task = parse_facts("facts(every=1000, distance=100)")
    assert task == Facts(1000, 100) and parse_facts(written(task)) == task and parse_facts("facts.txt") is None
    found = prepare(DataConfig(source="facts(every=1000, distance=100)", cache=str(tmp_path)))
    assert {name: split.tokens for name, split in found.splits.items()} == {
        "train": 4_000_000, "valid": 200_000, "test": 200_000
    }  # fmt: skip
    facts = np.count_nonzero(np.asarray(found.splits["test"].ids) >= FIRST_FACT)
    assert 0.85 < facts * 1000 / 2 / 200_000 <= 1


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("facts(distance=7)", "distance of facts is 7; expected 8 … 65,536 tokens"),
        (
            "facts(every=41)",
            "every of facts is 41; expected 42 … 1,000,000 tokens for each answer, as there are 96 keys",
        ),
        ("facts(often=1)", r"source is 'facts\(often=1\)'; expected whole numbers by name, such as facts\(every=1000"),
    ],
)
def test_impossible_streams_are_refused(source: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_facts(source)


def test_facts_are_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens is 'char'; expected 'byte', since the tokens of facts are bytes"):
        prepare(DataConfig(source="facts", tokens="char", cache=str(tmp_path)))
