"""The report of policies: arms with seeds, figures, pictures, and the attention along an episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.cli.main import main
from spanformer.core.events import FILE
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.report.policy_pictures import curve_picture, span_picture
from spanformer.report.policy_rows import arms_of, read_policy
from spanformer.rl.config import EnvConfig, PPOConfig, RLConfig
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.policy import Policy
from spanformer.rl.run import train
from spanformer.rl.watching import watch_episode

MODEL = ModelConfig(dim=16, layers=2, heads=2, block="gated", attention=AttentionConfig(max_span=32, init=0.3))
SMALL = PPOConfig(window=16, updates=3, minibatches=2, epochs=1, eval_episodes=4, tensorboard="off", save_every=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two seeds of a gated policy, one LSTM."""
    folder, config = tmp_path_factory.mktemp("runs"), RLConfig(env=EnvConfig("t_maze", 4, 4), model=MODEL)
    for name, policy, seed in (("a-1", "transformer", 1), ("a-2", "transformer", 2), ("lstm", "lstm", 1)):
        train(replace(config, out=str(folder / name), ppo=replace(SMALL, policy=policy, seed=seed)))
    return [folder / name for name in ("a-1", "a-2", "lstm")]


def test_runs_with_other_seeds_are_one_arm(runs: list[Path]) -> None:
    gated, lstm = arms_of([read_policy(path) for path in runs])
    assert (gated.name, len(gated.runs)) == ("Gated Transformer-XL", 2) and (lstm.name, len(lstm.runs)) == ("LSTM", 1)
    steps, middle, low, high = gated.curve("span_average")
    each = [run.curve("span_average")[1] for run in gated.runs]
    assert steps.tolist() == [64, 128, 192]
    assert np.allclose(middle, np.mean(each, 0)) and np.allclose(low, np.min(each, 0)) and (low <= high).all()
    assert [len(spans) for spans in gated.spans()] == [2, 2] and not lstm.spans()


def test_arms_are_named_by_what_differs(runs: list[Path]) -> None:
    one, two = (read_policy(runs[0]) for _ in range(2))
    two.config["optim"]["lr"] = 0.125
    assert [arm.name for arm in arms_of([one, two])] == [
        f"Gated Transformer-XL, lr {one.config['optim']['lr']}", "Gated Transformer-XL, lr 0.125",
    ]  # fmt: skip


def test_report_of_several_runs_draws_and_keeps_the_figures(runs: list[Path], tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    main(["rl", "report", *map(str, runs), "--out", str(tmp_path)])
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("curves", "spans", "episode-t_maze"))
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert [row["run"] for row in rows] == ["a-1", "a-2", "lstm"] and rows[1]["seed"] == 2
    assert all(row["episodes"] == 4 and 0 <= row["success"] <= 1 and row["env_steps"] == 192 for row in rows)
    page = (tmp_path / "report.html").read_text()
    assert page.count("4 episodes played") == 3 and "Attention along an episode" in page


def test_pictures_say_what_they_show(runs: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    arms = arms_of([read_policy(path) for path in runs])
    curves, spans = curve_picture(arms), span_picture(arms)
    assert curves is not None and spans is not None
    said = [text.get_text() for text in curves.figure.texts]
    assert any("means of up to 2 runs with other seeds" in text for text in said)
    (axis,) = spans.figure.axes
    assert sum(len(line.get_xdata()) for line in axis.lines if line.get_marker() == "o") == 2 * 2 * 2
    assert any("the cue is 4 steps back" in text.get_text() for text in axis.texts)
    assert span_picture(arms[1:]) is None


def test_curves_of_a_run_without_updates_are_left_out(runs: list[Path], tmp_path: Path) -> None:
    first = (runs[0] / FILE).read_text().split("\n")[0]
    (tmp_path / FILE).write_text(first + "\n")
    assert curve_picture(arms_of([read_policy(tmp_path)])) is None


def test_watched_episode_has_the_weights_of_every_decision() -> None:
    torch.manual_seed(0)
    policy = Policy("transformer", MODEL, 3, 2)
    found = watch_episode(policy, make_batch("memory_chain", 1, 6), seed=1)
    assert len(found.actions) == 7 and [tuple(each.shape) for each in found.maps] == [(2, 7, 7)] * 2
    for weights in found.maps:
        assert (weights.sum(2) - 1).abs().max() < 1e-5 and weights.triu(1).abs().max() == 0
    assert found.success in (0, 1) and found.episode_return == (1 if found.success else -1)


def test_policy_without_attention_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match="the policy is no transformer; expected one with attention"):
        watch_episode(Policy("lstm", MODEL, 3, 2), make_batch("memory_chain", 1, 6), seed=1)
