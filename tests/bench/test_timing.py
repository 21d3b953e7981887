"""Round-robin timing."""

import time

import pytest

from spanformer.bench import timing
from spanformer.bench.timing import round_robin


def test_functions_take_turns():
    order = []
    named = {name: (lambda name=name: order.append(name)) for name in "ab"}
    got = round_robin(named, repeats=3, warm_up=1, shortest=0.0)
    assert order == ["a", "b"] * 4
    assert len(got["a"].samples) == 3


def test_seconds_per_call_are_right():
    got = round_robin({"nap": lambda: time.sleep(0.01)}, repeats=3, shortest=0.03, wait=False)
    assert 0.009 < got["nap"].median < 0.1


def test_budget_leaves_two_rounds():
    got = round_robin({"nap": lambda: time.sleep(0.01)}, repeats=9, warm_up=0, shortest=0.0, budget=0.0)
    assert len(got["nap"].samples) == 2


def test_waiting_for_a_quiet_machine_is_reported_and_belongs_to_the_budget(monkeypatch):
    others = iter(range(0, 10_000, 10))  # each look finds ten more seconds used by other processes
    monkeypatch.setattr(timing, "_others_seconds", lambda: next(others))
    waited, told = [], []
    monkeypatch.setattr(timing.time, "sleep", waited.append)
    got = round_robin(
        {"f": lambda: None}, repeats=2, shortest=0.001, budget=6.0, on_round=lambda *row: told.append(row)
    )
    assert got["f"].disturbed == 2
    assert waited and sum(waited) <= 2.0
    assert told[0] == ("", 0.0) and told[-1] == ("", 1.0)
    assert told.count((timing.WAITING, 0.0)) == len(waited) and ("", 0.5) in told


def test_no_waiting_without_a_budget(monkeypatch):
    others = iter(range(0, 10_000, 10))
    monkeypatch.setattr(timing, "_others_seconds", lambda: next(others))
    monkeypatch.setattr(timing.time, "sleep", lambda _seconds: pytest.fail("it waited"))
    assert len(round_robin({"f": lambda: None}, repeats=9, shortest=0.0, budget=0.0)["f"].samples) == 2


def test_quiet_sample_is_kept_at_once(monkeypatch):
    monkeypatch.setattr(timing, "_others_seconds", lambda: 0.0)
    assert round_robin({"f": lambda: None}, repeats=2, shortest=0.001)["f"].disturbed == 0


def test_sgemm_rate():
    assert timing.sgemm_rate(1.0, side=100) == 2e6
