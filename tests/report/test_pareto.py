"""Quality against cost, as a picture and as a table."""

from __future__ import annotations

import dataclasses

import pytest

from spanformer.report import pareto
from spanformer.report.compare_table import HEADER, markdown, side_by_side
from spanformer.report.events import read_run
from spanformer.report.measures import NOTHING, attention_per_token
from support import synthetic_runs as synthetic

COLUMNS = [name for name in HEADER[2:] if name not in ("exactly right", "layers")]  # these runs have neither


def made(folder, name, *, flops=6.1e10, peak=5.1e8, **options):
    run = read_run(synthetic.write(folder / name, synthetic.events(name=name, layers=2, steps=40, **options)))
    measured = {"flops": {"learned": flops, "full": 1.9e11}, "peak_bytes": {"learned": peak, "full": 1e9}}
    return dataclasses.replace(run, costs=[dataclasses.replace(cost, **measured) for cost in run.costs])


@pytest.fixture
def named(tmp_path):
    return {
        "learned": made(tmp_path, "learned", floor=1.5, pace=0.2, peak=4e8),
        "whole": made(tmp_path, "whole", kind="full", floor=1.7, pace=0.6, flops=1.9e11, peak=9e8),
        "small": made(tmp_path, "small", floor=1.8, pace=0.7, flops=5e10, peak=5e8),
    }


def test_front_holds_undominated_runs():
    points = {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (3.0, 1.0), "beaten": (2.5, 2.0), "tie": (2.0, 2.0), "far": (9, 9)}
    assert pareto.pareto_front(points) == ["a", "b", "tie", "c"]


def test_quality_stands_against_operations_time_and_memory(named):
    picture = pareto.pareto_picture(named)
    assert picture is not None
    assert picture.sentence.endswith("both better and cheaper than small and learned; whole is beaten on both.")
    labels = [axis.get_xlabel() for axis in picture.figure.axes]
    assert labels == [pareto.COUNTED[0], pareto.TIME[0], pareto.MEMORY[0]]
    across = [[float(dots.get_offsets()[0][0]) for dots in axis.collections] for axis in picture.figure.axes]
    assert across == [[flops / 2048 for flops in (6.1e10, 1.9e11, 5e10)], [0.2, 0.6, 0.7], [4e8, 9e8, 5e8]]


def test_operations_that_were_not_counted_are_predicted(named):
    named["learned"] = dataclasses.replace(named["learned"], costs=[])
    picture = pareto.pareto_picture(named)
    assert picture is not None
    dots = [float(dots.get_offsets()[0][0]) for dots in picture.figure.axes[0].collections]
    assert dots == [attention_per_token(run) for run in named.values()]
    memory = picture.figure.axes[2]
    assert len(memory.collections) == 2  # the third run's is not known


def test_many_runs_get_numbers_and_a_list(tmp_path, named):
    many = {f"run number {n}": run for n, run in enumerate(list(named.values()) * 4)}
    picture = pareto.pareto_picture(many)
    assert picture is not None
    listed = [text.get_text() for text in picture.figure.texts]
    assert " 1  run number 0" in listed and "12  run number 11" in listed
    picture.save(tmp_path / "many.png")


def test_table_names_the_costs_by_which_a_run_is_best(named):
    header, rows = side_by_side(list(named.values()), list(named))
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert header == ["run", "bits per byte", "bits at 80 s", *COLUMNS] and all(len(row) == len(header) for row in rows)
    assert found["learned"]["best by"] == "FLOPs, time, memory" and found["small"]["best by"] == "FLOPs"
    assert found["whole"]["best by"] == NOTHING and found["whole"]["FLOPs, of full"] == "100 %"
    assert found["learned"]["FLOPs, of full"] == "32 %" and found["learned"]["peak memory"] == "381 MiB"


@pytest.mark.parametrize("objective, unit", [("encoder", "masked byte"), ("seq2seq", "target byte")])
def test_other_models_have_the_same_columns(tmp_path, objective, unit):
    """And old files, which have no costs, those that their rows allow."""
    runs = [made(tmp_path, name, floor=floor, objective=objective) for name, floor in (("a", 1.5), ("b", 1.7))]
    header, rows = side_by_side(runs, ["a", "b"])
    assert header == ["run", f"bits per {unit}", *COLUMNS]
    found = dict(zip(header, rows[0], strict=True))
    assert found["FLOPs, of full"] == "32 %" and found["best by"] == "FLOPs, time, memory" and rows[1][-1] == NOTHING
    picture = pareto.pareto_picture(dict(zip("ab", runs, strict=True)))
    assert picture is not None
    assert [axis.get_xlabel() for axis in picture.figure.axes] == [pareto.COUNTED[0], pareto.TIME[0], pareto.MEMORY[0]]
    old = [dataclasses.replace(run, costs=[]) for run in runs]
    header, rows = side_by_side(old, ["a", "b"])
    assert not {"FLOPs a token", "FLOPs, of full", "peak memory"} & set(header)
    assert {"a step", "average span", "longest span", "best by"} <= set(header)


def test_markdown_omits_empty_columns():
    shown = markdown(["run", "empty", "bits"], [["a|b", NOTHING, "1"], ["c", NOTHING, "2"]])
    assert shown == "| run | bits |\n| --- | --- |\n| a\\|b | 1 |\n| c | 2 |"
