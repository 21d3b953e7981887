"""Event files read back: whole, resumed, cut short, empty, and wrong."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from spanformer.report.events import read_run
from support import synthetic_runs as synthetic

SMALL = {"layers": 2, "heads": 2, "steps": 10}


def step(number, loss=1.0, **changes):
    row = {"event": "step", "step": number, "seconds": float(number), "tokens": number, "loss": loss,
           "spans": [[1.0, None], [0.0, 7.5]], "reach": [[33, 64], [32, 40]]}  # fmt: skip
    return row | changes


@pytest.fixture
def begun():
    return synthetic.events(**SMALL)[0]


def read(folder, rows, after=""):
    return read_run(synthetic.write(folder, rows, after=after))


def test_all_rows_are_read_from_the_folder_or_the_file(tmp_path):
    folder = synthetic.write(tmp_path, synthetic.events(**SMALL, dynamic=True))
    run = read_run(folder)
    assert [row.step for row in run.steps] == list(range(10, 101, 10))
    assert len([row for row in run.evals if row.split == "valid"]) == 10 and run.evals[-1].split == "test"
    assert run.steps[-1].spans.shape == run.steps[-1].reach.shape == (2, 2)
    assert run.start.shape.heads == 2 and run.start.parameters == 4_912_384
    assert run.costs[0].flops == {"learned": 6.1e10, "full": 1.9e11}
    assert run.dynamics[0].spans.shape == (6, len(synthetic.TEXT))
    assert run.stop is not None and run.stop.reason == "all steps are done"
    assert run.notes and run.checkpoints and not run.skips and not run.resumes
    again = read_run(folder / "events.jsonl")
    assert again.evals == run.evals and again.path == run.path


def test_head_without_a_learned_span_has_none(tmp_path, begun):
    spans = read(tmp_path, [begun, step(1)]).steps[0].spans
    np.testing.assert_array_equal(spans, [[1.0, math.nan], [0.0, 7.5]])


def test_resumed_run_drops_repeated_rows(tmp_path, begun):
    """Killed after step 5, resumed from the checkpoint of step 3: 4 and 5 are undone, 4 comes again, 5 does not."""
    rows = [
        begun, step(1), step(2), step(3, 30.0), synthetic.evaluation(3, 3.0, "valid", 5.0),
        {"event": "checkpoint", "step": 3, "path": "last"},
        step(4, 40.0), {"event": "note", "step": 4, "text": "undone"}, step(5, 50.0),
        synthetic.evaluation(5, 5.0, "valid", 6.0), {"event": "stop", "step": 5, "reason": "a signal", "seconds": 5.0},
        {"event": "resume", "step": 3, "time": 0.0},
        step(3, 31.0), synthetic.evaluation(3, 3.0, "valid", 5.5), step(4, 41.0),
        {"event": "skip", "step": 4, "reason": "NaN"},
    ]  # fmt: skip
    run = read(tmp_path, rows)
    assert [(row.step, row.loss) for row in run.steps] == [(1, 1.0), (2, 1.0), (3, 31.0), (4, 41.0)]
    assert [(row.step, row.bits) for row in run.evals] == [(3, 5.5)]
    assert not run.notes and run.stop is None
    assert [row.step for row in run.resumes] == [3] and [row.reason for row in run.skips] == ["NaN"]


def test_resumed_run_has_no_stop_event(tmp_path, begun):
    stop = {"event": "stop", "step": 1, "reason": "all steps are done", "seconds": 1.0}
    assert read(tmp_path, [begun, step(1), stop, {"event": "resume", "step": 1}, step(2)]).stop is None


@pytest.mark.parametrize("cut", [1, 30, 60])
def test_line_cut_short_by_a_kill_is_passed_over(tmp_path, begun, cut):
    run = read(tmp_path, [begun, step(1)], after=json.dumps(step(2))[:cut])
    assert [row.step for row in run.steps] == [1]


def test_line_cut_inside_a_character_is_passed_over(tmp_path, begun):
    file = synthetic.write(tmp_path, [begun, step(1)]) / "events.jsonl"
    file.write_bytes(file.read_bytes() + '{"event":"note","text":"é'.encode()[:-1])
    assert len(read_run(file).steps) == 1


def test_last_line_that_only_lacks_its_end_counts(tmp_path, begun):
    assert len(read(tmp_path, [begun, step(1)], after=json.dumps(step(2))).steps) == 2


def test_line_cut_short_before_a_resumption_is_passed_over(tmp_path, begun):
    rest = '{"event": "st\n' + json.dumps({"event": "resume", "step": 1}) + "\n" + json.dumps(step(2)) + "\n"
    assert [row.step for row in read(tmp_path, [begun, step(1)], after=rest).steps] == [1, 2]


def test_other_events_and_keys_are_left_alone(tmp_path, begun):
    run = read(tmp_path, [begun, {"event": "weather", "sun": True}, step(1, colour="green")])
    assert len(run.steps) == 1


def test_null_is_read_as_nan(tmp_path, begun):
    rows = [begun, step(1, None), step(2, math.nan), {"event": "cost", "step": 2, "flops": {"learned": 1.0}}]
    run = read(tmp_path, rows)
    assert all(math.isnan(row.loss) for row in run.steps) and run.costs[0].flops == {}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"loss": "low"}, "line 3: 'loss' is 'low'; expected a number"),
        ({"step": -1}, "line 3: 'step' is -1; expected a whole number"),
        ({"step": True}, "line 3: 'step' is True"),
        ({"tokens": 10**400}, "line 3: 'tokens' is 1000"),
        ({"spans": [[1.0], [2.0]]}, r"line 3: 'spans' is \[\[1.0\], \[2.0\]\]; expected 2 lists of 2 numbers"),
        ({"spans": [[1.0, -2.0], [0.0, 0.0]]}, "line 3: 'spans'"),
        ({"spans": [[1.0, math.inf], [0.0, 0.0]]}, "line 3: 'spans'"),
        ({"reach": [[1, None], [1, 1]]}, "line 3: 'reach'"),
        ({"reach": "x" * 1000}, "…; expected 2 lists of 2 numbers"),
        ({"seconds": None}, "line 3: 'seconds' is None; expected a number of seconds, 0 or more"),
        ({"memory": 7}, "line 3: 'memory' is 7"),
        ({"event": 5}, "line 3: 'event' is 5; expected text"),
    ],
)
def test_row_of_another_kind_is_refused(tmp_path, begun, change, said):
    with pytest.raises(ValueError, match=said) as caught:
        read(tmp_path, [begun, step(1), step(2, **change)])
    assert "events.jsonl, line 3" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_key_is_named(tmp_path, begun):
    row = step(1)
    del row["loss"]
    with pytest.raises(ValueError, match="line 2 has no 'loss'; expected a number"):
        read(tmp_path, [begun, row])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format": 2}, "format is 2; expected 1"),
        ({"unit": "inch"}, "'unit' is 'inch'; expected one of byte, char, word"),
        ({"shape": {"layers": 1}}, "'shape' does not fit"),
        ({"shape": {"layers": "1"}}, "'shape' is {'layers': '1'}; expected whole numbers"),
        ({"tokens": {"train": "many"}}, "'tokens' is {'train': 'many'}; expected a whole number for each split"),
        ({"run": None}, "'run' is None; expected text"),
        ({"config": []}, r"'config' is \[\]; expected an object"),
    ],
)
def test_start_of_another_kind_is_refused(tmp_path, begun, change, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, [begun | change])


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "events.jsonl is empty; expected the events.jsonl of a training run"),
        ("\n \n", "is empty"),
        ('{"event": "start", "form', "does not begin with a start event"),
        ('{"event": "step"}\n', "does not begin with a start event"),
        ("BEGUN\nnonsense\n", "line 2 is not JSON; expected one event per line"),
        ("BEGUN\nnonsense\n{}\n", "line 2 is not JSON"),
        ("BEGUN\nnonsense\nnonsense", "line 2 is not JSON"),
        ("BEGUN\n" + "[" * 100_000 + "\n", "line 2 is not JSON"),
        ("BEGUN\n[]\n", "line 2 is JSON but not an object; expected one event"),
        ("BEGUN\nBEGUN\n", "line 2 starts a second run"),
    ],
)
def test_other_files_are_refused(tmp_path, begun, content, said):
    (tmp_path / "events.jsonl").write_text(content.replace("BEGUN", json.dumps(begun)))
    with pytest.raises(ValueError, match=said) as caught:
        read_run(tmp_path)
    assert str(caught.value).count("\n") == 0


def test_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match=r"the file of events '.*events\.jsonl' is not a regular file"):
        read_run(tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing does not exist; expected a training run's folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"events.jsonl does not exist"):
        read_run(tmp_path)
