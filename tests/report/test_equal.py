"""Bits at equal tokens and at equal time: where they are read, and when the table shows them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from spanformer.core.fields import as_dict
from spanformer.report.compare_rows import compare_rows
from spanformer.report.compare_table import side_by_side
from spanformer.report.equal import at_equal
from spanformer.report.events import read_run
from support import synthetic_runs as synthetic


def made(folder, name, **options):
    return read_run(synthetic.write(folder / name, synthetic.events(name=name, layers=2, heads=2, **options)))


@pytest.fixture
def runs(tmp_path):
    """A quick run of 400 steps in 80 s, and a slow one of 260 steps in 156 s, evaluated every 40 and every 20 steps."""
    return [made(tmp_path, "quick", steps=40, pace=0.2), made(tmp_path, "slow", kind="full", steps=26, pace=0.6)]


def test_bits_are_read_where_the_shorter_run_ended(runs):
    quick, slow = ([row for row in run.evals if row.split == "valid"] for run in runs)
    equal = at_equal(runs)
    assert (equal.tokens, equal.seconds) == (2048 * slow[-1].step, quick[-1].seconds)
    assert equal.at_tokens[1] == slow[-1].bits and equal.at_seconds[0] == quick[-1].bits
    before, after = (next(row for row in quick if row.step == step) for step in (240, 280))
    step = slow[-1].step
    assert step == 260 and equal.at_tokens[0] == pytest.approx((before.bits + after.bits) / 2)
    steps, bits = ([getattr(row, name) for row in slow] for name in ("seconds", "bits"))
    assert equal.at_seconds[1] == pytest.approx(float(np.interp(80.0, steps, bits)))
    assert equal.tokens_differ and equal.seconds_differ


def test_table_shows_what_differs(runs):
    header, rows = side_by_side(runs, ["quick", "slow"])
    tokens = "bits at 532 k tokens"
    assert header[:4] == ["run", "bits per byte", tokens, "bits at 80 s"]
    equal = at_equal(runs)
    assert [row[2] for row in rows] == [f"{bits:.3f}" for bits in equal.at_tokens]
    assert [row[3] for row in rows] == [f"{bits:.3f}" for bits in equal.at_seconds]


def test_equal_runs_have_no_such_columns(tmp_path):
    runs = [made(tmp_path, name, steps=40, pace=pace) for name, pace in (("a", 0.4), ("b", 0.404))]
    equal = at_equal(runs)
    assert not equal.tokens_differ and not equal.seconds_differ
    assert not [name for name in side_by_side(runs, ["a", "b"])[0] if name.startswith("bits at")]
    same_steps = [runs[0], made(tmp_path, "slow", steps=40, pace=0.8)]
    assert [name for name in side_by_side(same_steps, ["a", "slow"])[0] if name.startswith("bits at")] == [
        "bits at 2.7 min"
    ]


def test_rows_of_programs_always_have_them(runs, tmp_path):
    rows = json.loads(json.dumps([as_dict(row) for row in compare_rows(runs, ["quick", "slow"])]))
    equal = at_equal(runs)
    assert [row["bits_at_equal_tokens"] for row in rows] == equal.at_tokens
    assert [row["bits_at_equal_seconds"] for row in rows] == equal.at_seconds
    assert {row["equal_tokens"] for row in rows} == {equal.tokens} and {row["equal_seconds"] for row in rows} == {80.0}
    (alone,) = compare_rows(runs[:1], ["quick"])
    assert alone.bits_at_equal_tokens == alone.bits_at_equal_seconds == alone.bits
    assert (alone.equal_tokens, alone.equal_seconds) == (alone.tokens, alone.seconds)


def test_runs_without_evaluations_are_read_from_training(tmp_path):
    runs = [made(tmp_path, "a", steps=30, evals=False), made(tmp_path, "b", steps=40, evals=False)]
    equal = at_equal(runs)
    assert equal.tokens == 2048 * 300 and all(math.isfinite(bits) for bits in equal.at_tokens)


def test_what_cannot_be_compared_has_no_equal_bits(tmp_path, runs):
    for other in (made(tmp_path, "words", unit="word"), dataclasses.replace(runs[0], steps=[], evals=[])):
        equal = at_equal([runs[1], other])
        assert math.isnan(equal.tokens) and not equal.tokens_differ and not equal.seconds_differ
        (row, _) = compare_rows([runs[1], other], ["slow", "other"])
        assert row.equal_tokens is None and row.bits_at_equal_seconds is None and row.bits
