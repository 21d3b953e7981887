"""Streams: nothing lost, nothing twice, and a stop in the middle leaves no trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spanformer.data import Lanes, every_token


def take(lanes: Lanes, count: int) -> list:
    return list(itertools.islice(lanes, count))


@pytest.mark.parametrize(("tokens", "lanes", "block"), [(100, 4, 7), (4, 1, 3), (129, 3, 1), (63, 1, 20), (40, 5, 7)])
def test_rows_continue_until_the_data_ends(tokens: int, lanes: int, block: int) -> None:
    ids = np.arange(tokens, dtype=np.uint8)
    n = tokens // lanes
    stream = Lanes(ids, lanes, block)
    starts = [p for p in range(0, n, block) if p + block + 1 <= n]
    for i, p in enumerate(starts):
        batch = next(stream)
        assert batch.x.dtype == batch.y.dtype == np.int64 and batch.x.flags.c_contiguous
        assert batch.reset == (i == 0)
        assert batch.x.tolist() == [list(range(r * n + p, r * n + p + block)) for r in range(lanes)]
        assert np.array_equal(batch.y, batch.x + 1)
    again = next(stream)
    assert again.reset and stream.epoch == 1


def test_restarts_are_drawn_from_seed_and_epoch() -> None:
    def offsets(seed: int) -> list[int]:
        batches = take(Lanes(np.arange(40), 1, 16, seed=seed), 60)
        return [int(batch.x[0, 0]) for batch in batches if batch.reset]

    first = offsets(0)
    assert first[0] == 0 and first == offsets(0) != offsets(1)
    assert all(0 <= offset < 16 for offset in first) and len(set(first)) > 5


def test_short_lanes_restart_where_a_block_still_fits() -> None:
    batches = take(Lanes(np.arange(9), 1, 7), 50)  # 7 + 1 of 9 tokens: offsets 0 and 1
    assert {int(batch.x[0, 0]) for batch in batches} == {0, 1} and all(batch.reset for batch in batches)
    take(Lanes(np.arange(8), 1, 7), 50)


def test_resuming_is_exact_wherever_it_stopped() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 1003).astype(np.uint16)
    truth = take(Lanes(ids, 3, 50, seed=5), 30)
    for stop in range(30):
        stopped = Lanes(ids, 3, 50, seed=5)
        take(stopped, stop)
        resumed = Lanes(ids, 3, 50, seed=5)
        resumed.load(stopped.state())
        for want, got in zip(truth[stop:], take(resumed, 30 - stop), strict=True):
            assert np.array_equal(want.x, got.x) and np.array_equal(want.y, got.y) and want.reset == got.reset


def test_rows_of_all_processes_make_the_whole_batch() -> None:
    ids = np.arange(1000)
    whole = take(Lanes(ids, 6, 10, seed=2), 40)
    shares = [take(Lanes(ids, 6, 10, seed=2, rows=slice(r, r + 2)), 40) for r in (0, 2, 4)]
    for want, *parts in zip(whole, *shares, strict=True):
        assert np.array_equal(want.x, np.concatenate([part.x for part in parts]))
        assert np.array_equal(want.y, np.concatenate([part.y for part in parts]))
        assert {part.reset for part in parts} == {want.reset}


def test_batch_reads_only_what_it_needs(tmp_path) -> None:
    """A sparse file of a terabyte could not be loaded."""
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    ids = np.memmap(path, np.uint8, "r")
    assert next(Lanes(ids, 64, 128)).x.shape == (64, 128)
    assert next(every_token(ids, 64, 128)).x.shape == (64, 128)


SIZES = [(2, 1, 1), (2, 5, 3), (3, 2, 1), (64, 1, 63), (64, 1, 64), (65, 8, 8), (65, 8, 9), (111, 7, 4), (129, 130, 2)]


@pytest.mark.parametrize(("tokens", "lanes", "block"), SIZES)
def test_every_token_but_the_first_is_predicted_once(tokens: int, lanes: int, block: int) -> None:
    ids = np.random.default_rng(1).integers(1, 200, tokens).astype(np.uint8)
    batches = list(every_token(ids, lanes, block))
    assert [batch.reset for batch in batches] == [True] + [False] * (len(batches) - 1)
    assert all(batch.x.shape == batch.y.shape == batch.counted.shape == (lanes, block) for batch in batches)
    x, y, counted = (np.concatenate([getattr(b, n) for b in batches], 1) for n in ("x", "y", "counted"))
    assert np.array_equal(y[counted], ids[1:])  # boolean indexing goes lane by lane
    assert np.array_equal(x[counted], ids[:-1])
    assert (np.diff(counted.astype(int), axis=1) <= 0).all(), "padding comes last"
    assert not x[~counted].any() and counted.sum(1).max() - counted.sum(1).min() <= 1
    assert batches[-1].counted.any(), "no batch is all padding"


def test_bad_arguments_are_refused() -> None:
    ids = np.zeros(99, np.uint8)
    with pytest.raises(ValueError, match=r"99 tokens are too few for 10 lanes with blocks of 9, which need 100; use"):
        Lanes(ids, 10, 9)
    with pytest.raises(ValueError, match="lanes is 0; expected at least 1"):
        Lanes(ids, 0, 9)
    with pytest.raises(ValueError, match="block is -1; expected at least 1"):
        next(every_token(ids, 1, -1))
    with pytest.raises(ValueError, match="seed is -1"):
        Lanes(ids, 1, 9, seed=-1)
    with pytest.raises(ValueError, match="selects none of 2 lanes"):
        Lanes(ids, 2, 9, rows=slice(2, 4))
    with pytest.raises(ValueError, match="1 tokens leave nothing to predict"):
        next(every_token(ids[:1], 1, 8))
    with pytest.raises(ValueError, match="the saved stream has lanes 3; expected 2, as in this run"):
        Lanes(ids, 2, 9).load(Lanes(ids, 3, 9).state())
