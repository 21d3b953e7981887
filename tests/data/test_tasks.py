"""Synthetic tasks: every text holds what its questions ask for, at the distance that was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spanformer.data import DataConfig, TaskStream, parse_task, prepare, texts_of
from spanformer.data.tasks import TASKS, DistanceTask, Task, written
from spanformer.data.tasks.chase import Chase
from spanformer.data.tasks.copy import Copy
from spanformer.data.tasks.duplicate import Duplicate
from spanformer.data.tasks.needle import FACTS, FIRST_FACT, Needle
from spanformer.data.tasks.recall import FIRST_FILLER, Recall
from spanformer.data.tasks.words import Repeat, Reverse

SMALL = (
    Recall(distance=31, pairs=3), Recall(distance=6, pairs=3), Recall(distance=40, nearest=8, pairs=4),
    Recall(distance=2, pairs=1),
    Copy(distance=33, symbols=5), Copy(distance=6, symbols=5), Copy(distance=64, nearest=6, symbols=5),
    Needle(distance=16, facts=4), Needle(distance=101, nearest=17, facts=3),
)  # fmt: skip


def drawn(task: Task, count: int = 200) -> np.ndarray:
    texts = task.draw(np.random.default_rng(0), count)
    assert texts.shape == (count, task.length) and texts.dtype == np.uint8 and texts.max() < 128
    assert task.answers().shape == (task.length,) and not task.answers()[0]
    return texts


def before(text: np.ndarray, end: int, token: int) -> int:
    """The last place of a token before another."""
    return int(np.flatnonzero(text[:end] == token)[-1])


@pytest.mark.parametrize("task", [task for task in SMALL if not isinstance(task, Copy)], ids=written)
def test_each_question_follows_from_one_pair(task: DistanceTask) -> None:
    """The token before an answer occurs once before the questions, followed by the answer."""
    for text in drawn(task):
        for at in np.flatnonzero(task.answers()):
            context = text[: task.distance]
            (place,) = np.flatnonzero(context == text[at - 1])
            assert context[place + 1] == text[at]


def test_distances_of_recall() -> None:
    """A pair is `distance` tokens before its question on average, and all pairs lie within two blocks of pairs."""
    task = Recall(distance=50, pairs=4)
    found = np.array([[at - 1 - before(text, at - 1, text[at - 1]) for at in np.flatnonzero(task.answers()).tolist()]
                      for text in drawn(task)])  # fmt: skip
    assert (found.mean(1) == 50).all() and found.min() >= 50 - 6 and found.max() <= 50 + 6
    assert len(set(map(tuple, found))) > 20  # the order of the questions differs, or a copy would do
    assert (drawn(task)[:, 8:50] >= FIRST_FILLER).all()


def test_distances_are_drawn_between_two() -> None:
    task = Recall(distance=200, nearest=16, pairs=2)
    first = [before(text, task.distance, key) for text in drawn(task, 500) for key in text[task.distance :: 2]]
    back = task.distance - np.array(first).reshape(-1, 2).min(1)
    assert 16 <= back.min() < 20 and 180 < back.max() <= 200
    assert 50 < np.median(back) < 64  # log-uniform: √(16 · 200) = 57


@pytest.mark.parametrize("task", [task for task in SMALL if isinstance(task, Copy)], ids=written)
def test_copies(task: Copy) -> None:
    backs = set()
    for text in drawn(task):
        asked = text[task.answers()]
        assert len(asked) == len(set(asked)) == task.symbols and text[task.distance] == 0
        back = task.distance - before(text, task.distance, 0)
        assert (text[np.flatnonzero(task.answers()) - back] == asked).all()
        backs.add(back)
    assert backs == {task.distance} if not task.nearest else min(backs) < 10 and max(backs) > 50


def test_facts_are_in_the_far_half() -> None:
    task = Needle(distance=100, facts=4)
    for text in drawn(task):
        capitals = np.flatnonzero((text[:100] >= ord("A")) & (text[:100] <= ord("Z")))
        assert len(capitals) == 4 and capitals.max() < 50
        rest = np.delete(text[:100], [*capitals, *(capitals + 1)])
        assert all(chr(token).islower() or token == ord(" ") for token in rest)


def test_more_keys_than_letters_are_those_of_the_stream() -> None:
    task, asked = Needle(distance=64, facts=4, keys=FACTS), set()
    for text in task.draw(np.random.default_rng(0), 200):
        questions = text[task.distance :].reshape(-1, 2)
        asked |= set(questions[:, 0].tolist())
        for key, value in questions:
            (place,) = np.flatnonzero(text[: task.distance] == key)
            assert place < 32 and text[place + 1] == value < ord("A")
    assert asked == set(range(FIRST_FACT, FIRST_FACT + FACTS))


def test_duplicate_is_the_papers() -> None:
    task = Duplicate()
    texts = drawn(task)
    assert task.length == 256 and task.answers().sum() == 127 == task.answers()[129:].sum()
    assert (texts[:, [0, 128]] == 0).all() and (texts[:, 1:128] == texts[:, 129:]).all()
    assert set(texts[:, 1:128].ravel()) == set(range(1, 128))


@pytest.mark.parametrize(
    "task", [Chase(), Chase(14, search=1), Chase(hops=1, nodes=2, questions=1), Chase(31, 5, 3, fewest=5)], ids=written
)
def test_chase_follows_pointers(task: Chase) -> None:
    asked = set()
    for text in drawn(task):
        listed, questions = text[: task.nodes].astype(int) - 32, text[task.nodes :].reshape(-1, 3).astype(int)
        assert sorted(listed) == list(range(task.nodes)) and (listed != np.arange(task.nodes)).all()
        for hops, start, end in questions:
            at = start - 32
            for _ in range(hops):
                at = list(listed).index(at) if task.search else listed[at]
            assert at == end - 32
            asked.add(hops)
        assert (text[task.answers()] == questions[:, 2]).all()
    assert asked == set(range(task.fewest, task.hops + 1))


@pytest.mark.parametrize("kind", [Repeat, Reverse])
@pytest.mark.parametrize(("symbols", "fewest"), [(1, 0), (9, 0), (40, 3), (127, 1)])
def test_words_are_repeated_and_reversed(kind: type[Repeat], symbols: int, fewest: int) -> None:
    task, sizes = kind(symbols, fewest), []
    for text in drawn(task):
        given, asked = text[1 : symbols + 1], text[task.answers()]
        word = given[given > 0]
        assert len(set(word)) == len(word) and text[0] == text[symbols + 1] == 0 and (given[: -len(word)] == 0).all()
        want = word if kind is Repeat else word[::-1]
        assert (asked == np.pad(want, (0, symbols - len(word)))).all()
        sizes.append(len(word))
    if not fewest:
        assert set(sizes) == {symbols}
    else:  # half of them below the geometric mean
        assert min(sizes) < fewest + 3 and max(sizes) > 0.8 * symbols
        assert abs(np.mean(np.array(sizes) < (fewest * (symbols + 1)) ** 0.5) - 0.5) < 0.15


@pytest.mark.parametrize("name", TASKS)
def test_notation(name: str) -> None:
    task = parse_task(name)
    assert task is not None and task == TASKS[name]() and parse_task(written(task)) == task
    assert parse_task(f"{name}()") == task and parse_task(f"./{name}") is None
    first = next(iter(vars(task)))
    assert parse_task(f" {name} ( {first} = 30 ) ") == replace(task, **{first: 30})
    for text in (
        f"{name}(30)",
        f"{name}(what=3)",
        f"{name}({first}=x)",
        f"{name}({first}=-1)",
        f"{name}({first}=9, {first}=9)",
    ):
        with pytest.raises(ValueError, match=f"expected whole numbers by name, such as {name}\\({first}="):
            parse_task(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recall(pairs=0)", "pairs of the task recall is 0; expected 1 … 32, as there are 32 keys"),
        ("recall(pairs=33)", "pairs of the task recall is 33; expected 1 … 32"),
        ("recall(pairs=8, distance=15)", "distance of the task recall is 15; expected 16 … 65,536 tokens"),
        ("recall(pairs=8, distance=64, nearest=65)", "nearest of the task recall is 65; expected 0, .* or 16 … 64"),
        ("copy(symbols=96)", "symbols of the task copy is 96; expected 1 … 95, as none comes twice"),
        ("copy(symbols=8, distance=8)", "distance of the task copy is 8; expected 9 … 65,536"),
        ("duplicate(symbols=0)", "symbols of the task duplicate is 0; expected 1 … 65,536"),
        ("chase(hops=8)", "hops of the task chase is 8; expected 1 … 7, less than nodes and 32"),
        ("chase(nodes=1)", "nodes of the task chase is 1; expected 2 … 96"),
        ("chase(search=2)", "search of the task chase is 2; expected 0 or 1"),
        ("chase(fewest=7)", "fewest of the task chase is 7; expected 1 … hops, 6"),
        ("reverse(symbols=128)", "symbols of the task reverse is 128; expected 1 … 127, as none comes twice"),
        ("repeat(symbols=5, fewest=6)", "fewest of the task repeat is 6; expected 0, .* or 1 … 5"),
        ("needle(facts=27)", "facts of the task needle is 27; expected 1 … 26, as there are 26 keys"),
        ("needle(keys=97)", "keys of the task needle is 97; expected 1 … 96"),
        ("needle(facts=4, distance=15)", "distance of the task needle is 15; expected 16 … 65,536"),
    ],
)
def test_parameters_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_task(text)


def test_splits_are_prepared_as_texts(tmp_path: Path) -> None:
    config = DataConfig("copy(symbols=3, distance=9)", cache=str(tmp_path))
    data, task = prepare(config), parse_task(config.source)
    assert task is not None and data.vocab.kind == "byte"
    texts = {name: texts_of(task, split.ids, name) for name, split in data.splits.items()}
    assert {name: len(each) for name, each in texts.items()} == {"train": 20_000, "valid": 500, "test": 1000}
    assert len({each[:10].tobytes() for each in texts.values()}) == 3
    assert prepare(config).folder == data.folder
    with pytest.raises(ValueError, match="tokens is 'char'; expected 'byte', since the tokens of copy are"):
        prepare(replace(config, tokens="char"))
    with pytest.raises(ValueError, match="valid has 10 tokens, and a text of the task copy has 13"):
        texts_of(task, data.splits["valid"].ids[:10], "valid")


def test_stream_shows_every_text_once_and_continues() -> None:
    texts = np.arange(14, dtype=np.uint8).reshape(7, 2)
    stream = TaskStream(texts, 3, seed=4)
    epoch = np.concatenate([next(stream), next(stream)])
    assert len({tuple(row) for row in epoch}) == 6
    saved, rest = stream.state(), [next(stream) for _ in range(3)]
    assert stream.epoch == 2
    again, half = TaskStream(texts, 3, seed=4), TaskStream(texts, 3, seed=4, rows=slice(1, 3))
    again.load(saved)
    half.load(saved)
    for expected in rest:
        assert (next(again) == expected).all() and (next(half) == expected[1:3]).all()
    with pytest.raises(ValueError, match="there are 7 texts to train on; expected at least a batch of 8"):
        TaskStream(texts, 8)
