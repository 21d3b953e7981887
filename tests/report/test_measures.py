"""Numbers and words from a run's rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from spanformer.cost.model import full, step_cost
from spanformer.report import measures
from spanformer.report.events import read_run
from support import synthetic_runs as synthetic


@pytest.fixture
def run(tmp_path):
    return read_run(synthetic.write(tmp_path, synthetic.events(layers=2, heads=3, steps=20)))


def test_nats_per_token_become_bits_per_unit(run):
    assert measures.bits_per_unit(run, math.log(2)) == pytest.approx(1.0)
    start = dataclasses.replace(run.start, unit="word", tokens={"train": 300}, units={"train": 200})
    run = dataclasses.replace(run, start=start)
    assert measures.bits_per_unit(run, math.log(2)) == pytest.approx(1.5)


def test_bits_of_tokens_that_are_asked_for_are_counted_for_each_of_them(tmp_path):
    rows = synthetic.events(layers=2, heads=3, steps=2, objective="encoder")
    masked = read_run(synthetic.write(tmp_path / "bytes", rows))
    assert masked.start.bits_unit == "masked byte"
    rows[0]["tokens"] = {"train": 300}  # of several bytes each
    pieces = read_run(synthetic.write(tmp_path / "pieces", rows))
    assert pieces.start.bits_unit == "masked token" and measures.bits_per_unit(pieces, math.log(2)) == pytest.approx(
        1.0
    )


def test_operations_are_counted_for_each_token_of_the_batch_they_were_measured_with(run):
    assert measures.counted_per_token(run) == 6.1e10 / 2048 and measures.counted_share(run) == 6.1 / 19
    cost = dataclasses.replace(run.costs[0], tokens=1000)
    assert measures.counted_per_token(dataclasses.replace(run, costs=[cost])) == 6.1e7
    assert math.isnan(measures.counted_share(dataclasses.replace(run, costs=[])))


@pytest.mark.parametrize("count", [0, 1, 2, 59, 60, 121, 200])
def test_smoothing_is_a_mean_over_equally_many_on_either_side(count):
    values = np.random.default_rng(0).random(count)
    smoothed, window = measures.smooth(values)
    expected = []
    for at in range(count):
        side = min(count // 60, at, count - 1 - at)
        expected.append(values[at - side : at + side + 1].mean())
    np.testing.assert_allclose(smoothed, expected, rtol=1e-12)
    assert window == 2 * (count // 60) + 1


def test_cost_is_predicted_with_the_last_reach_beside_full_attention(run):
    costs = measures.predicted(run)
    shape = run.start.shape
    assert costs == (step_cost(shape, run.steps[-1].reach.tolist()), step_cost(shape, full(shape)))
    assert measures.predicted(dataclasses.replace(run, steps=[])) is None


def test_time_of_a_step_is_measured_or_taken_from_the_rows(run):
    assert measures.seconds_per_step(run) == pytest.approx(0.4)
    assert measures.seconds_per_step(dataclasses.replace(run, costs=[])) == pytest.approx(0.4)
    assert math.isnan(measures.seconds_per_step(dataclasses.replace(run, costs=[], steps=run.steps[:1])))


def test_pace_multiplies_to_the_time_of_training(run):
    assert measures.pace(run) * run.steps[-1].step == pytest.approx(run.steps[-1].seconds)
    late = [dataclasses.replace(row, seconds=row.seconds + 1000) for row in run.steps]  # as fit-spans, after its survey
    assert measures.pace(dataclasses.replace(run, steps=late)) == pytest.approx(0.4)
    assert measures.pace(dataclasses.replace(run, steps=run.steps[:1])) == pytest.approx(0.4)
    assert math.isnan(measures.pace(dataclasses.replace(run, steps=[])))


def test_parts_of_a_step_add_up_to_its_time(run):
    times = measures.step_times(run)
    assert times is not None
    assert sum(times["learned"].values()) == pytest.approx(measures.seconds_per_step(run))
    assert times["full"] == pytest.approx({"attention": 0.72, "products": 0.16, "optimizer": 0.12, "rest": 0.04})
    said = "attention 20 %, other products 40 %, optimiser 30 %, the rest 10 %"
    assert measures.said_parts(times["learned"]) == said
    assert measures.time_parts({"step": 1.0, "attention": 0.5, "products": 0.4, "optimizer": 0.2})["rest"] == 0
    assert measures.step_times(dataclasses.replace(run, costs=[])) is None


def test_times_without_the_optimiser_are_not_taken_for_a_steps(tmp_path):
    """Older files hold the time of forward and backward as that of a step."""
    rows = synthetic.events(layers=2, heads=3, steps=12)
    (cost,) = (row for row in rows if row["event"] == "cost")
    cost["step_seconds"] = {"learned": 0.01, "full": 0.02}
    del cost["optimizer_seconds"], cost["products_seconds"]
    run = read_run(synthetic.write(tmp_path / "old", rows))
    assert measures.seconds_per_step(run) == pytest.approx(0.4) and measures.step_times(run) is None
    assert run.costs[0].attention_seconds and run.costs[0].flops


def test_quality_is_validation_or_else_training(run):
    assert measures.quality(run).bits[-1] == pytest.approx(run.evals[-2].bits)
    unseen = dataclasses.replace(run, evals=[])
    np.testing.assert_allclose(measures.quality(unseen).bits, [row.loss / math.log(2) for row in run.steps])


@pytest.mark.parametrize(
    "said, expected",
    [
        (measures.amount(0), "0"),
        (measures.amount(950), "950"),
        (measures.amount(9_999), "9,999"),
        (measures.amount(12_345), "12.3 k"),
        (measures.amount(4_912_384), "4.91 M"),
        (measures.amount(193e9), "193 G"),
        (measures.amount(math.nan), "–"),
        (measures.size(512), "512 bytes"),
        (measures.size(1.3e9), "1.21 GiB"),
        (measures.lasting(0.08), "80 ms"),
        (measures.lasting(1.04), "1.04 s"),
        (measures.lasting(800), "13.3 min"),
        (measures.lasting(9000), "2.5 h"),
        (measures.lasting(math.nan), "–"),
        (measures.tokens(12.345), "12.3"),
        (measures.tokens(1024.4), "1,024"),
        (measures.percent(0.131), "13 %"),
        (measures.percent(0.0131), "1.3 %"),
        (measures.percent(math.nan), "–"),
    ],
)
def test_numbers_read_well(said, expected):
    assert said == expected
