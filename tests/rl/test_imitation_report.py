"""The report of runs that learn from recorded episodes: arms with seeds, figures, pictures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from spanformer.cli.main import main
from spanformer.core.policy_events import AskedEvent
from spanformer.report.imitation import ImitationArm, ImitationRows, asked_picture, figures_of, said_of_arm
from spanformer.report.imitation_rows import imitation_arms


def run(name: str, asked: dict[float, float], **learn) -> ImitationRows:
    """A run that got these returns for these targets."""
    events = [AskedEvent(5, "graph", target, 10, got, 1.0, 8.0) for target, got in asked.items()]
    config = {"out": name, "imitate": {"method": "decision", "top": 1.0, "seed": 1, **learn}, "model": {"dim": 8}}
    return ImitationRows(name, "graph", 100, config, (-40.0, -1.0), [], events)


def runs() -> list[ImitationRows]:
    return [
        run("a-1", {-1.0: -2.0, -4.0: -5.0, -8.0: -5.0}),
        run("a-2", {-8.0: -9.0, -4.0: -3.0, -1.0: -1.0}, seed=2),
        run("clone", {math.nan: -20.0}, method="cloning"),
        run("best", {math.nan: -10.0}, method="cloning", top=0.1),
    ]


def test_runs_with_other_seeds_are_one_arm() -> None:
    decision, clone, best = imitation_arms(runs())
    assert [arm.name for arm in (decision, clone, best)] == [
        "Decision Transformer", "cloning", "cloning of the best 10 %"
    ]  # fmt: skip
    assert [(one.target, one.each) for one in decision.got()] == [
        (-8.0, [-5.0, -9.0]), (-4.0, [-5.0, -3.0]), (-1.0, [-2.0, -1.0])
    ]  # fmt: skip
    assert decision.rank_correlation() == 1 and math.isnan(clone.rank_correlation())
    assert said_of_arm(decision).endswith("asked -1, got -1.500; rank correlation of asked and got 1.000")


def test_target_that_one_run_was_not_asked_for_is_left_out() -> None:
    arm = ImitationArm("x", [run("a", {-1.0: -2.0, -4.0: -4.0}), run("b", {-1.0: -3.0})])
    assert [one.target for one in arm.got()] == [-1.0] and math.isnan(arm.rank_correlation())


def test_figures_have_every_run_and_normalised_points() -> None:
    decision, clone, _ = (figures_of(arm, (-40.0, 0.0)) for arm in imitation_arms(runs()))
    assert decision["asked"][2]["points"] == [95.0, 97.5] and decision["asked"][2]["target"] == -1
    assert decision["runs"] == ["a-1", "a-2"] and decision["seeds"] == [1, 2] and decision["rank_correlation"] == 1
    assert clone["asked"] == [{"got": -20.0, "each": [-20.0], "deviation": 1.0, "points": [50.0]}]


def test_picture_has_a_level_for_what_is_asked_for_nothing() -> None:
    pytest.importorskip("matplotlib")
    arms = imitation_arms(runs())
    picture = asked_picture(arms, "graph", (-40.0, -1.0))
    assert picture is not None and asked_picture(arms[1:], "graph", (-40.0, -1.0)) is None
    (axis,) = picture.figure.axes
    levels = [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "-."]
    assert levels == [-20.0, -10.0]
    assert any("means of 2 runs" in text.get_text() for text in picture.figure.texts)


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [(["5", "1"], r"--scores is \(5.0, 1.0\); expected two returns"), (["0", "1"], "is a policy of `rl train`")],
)
def test_wrong_scores_are_refused(scores: list[str], sentence: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "policy", "step": 0}) + "\n")
    with pytest.raises((SystemExit, ValueError)):
        main(["rl", "report", str(tmp_path), "--scores", *scores])
    assert re.search(sentence, capsys.readouterr().err)
