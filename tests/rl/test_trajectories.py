"""Recorded episodes: what is written, what is refused, which checkpoints act, and Minari's copy."""

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
from spanformer.rl.config import EnvConfig, PPOConfig, RLConfig
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.levels import acting, checkpoints, collect_policy
from spanformer.rl.minari_export import export_minari
from spanformer.rl.recording import random_player, record
from spanformer.rl.run import train
from spanformer.rl.trajectories import About, Trajectories, checked, read_trajectories


def some_data(name: str = "key_to_door", count: int = 20, rows: int = 5) -> Trajectories:
    env = make_batch(name, rows, 3)
    env.seed(1)
    return record(random_player(env, 1), rows, count, About(name, 3, env.actions, False, "random actions", 1))


def test_recorded_steps_are_those_of_the_environment() -> None:
    """A row's episodes, played again by their actions."""
    data, rows = some_data("graph", 15), 5
    env = make_batch("graph", rows, 3)
    env.seed(1)
    seen = env.reset()
    places = [iter(range(row, 15, rows)) for row in range(rows)]  # episode k of a row is at k · rows + row
    now = [next(place) for place in places]
    at = np.zeros(rows, np.int64)
    checked_steps = 0
    for _ in range(3):  # until the first row would end its last episode, walks of at most 3 steps
        index = data.starts[now] + at
        assert (data.observation[index] == seen).all()
        step = env.step(data.action[index])
        checked_steps += rows
        assert (data.reward[index] == step.reward).all()
        ended, at, seen = step.terminated | step.truncated, at + 1, step.observation
        for row in np.flatnonzero(ended):
            e = now[row]
            assert data.lengths[e] == at[row] and data.terminated[e] == step.terminated[row]
            assert (data.final[e] == step.final[row]).all() and data.success[e] == step.success[row]
            now[row], at[row] = next(places[row]), 0
    assert checked_steps == 15 and len(data) == 15


def test_returns_to_go_are_sums_of_later_rewards() -> None:
    data = some_data()
    data = replace(data, reward=np.random.default_rng(0).normal(size=data.steps).astype(np.float32))
    for e, (start, n) in enumerate(zip(data.starts, data.lengths, strict=True)):
        rewards = data.reward[start : start + n].astype(np.float64)
        assert np.allclose(data.returns_to_go[start : start + n], [rewards[t:].sum() for t in range(n)], atol=1e-9)
        assert np.isclose(data.returns[e], rewards.sum()) and (data.time[start : start + n] == np.arange(n)).all()


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_best_episodes_hold_the_share_of_steps(share: float) -> None:
    data = some_data()
    data = replace(data, reward=np.random.default_rng(0).normal(size=data.steps).astype(np.float32))
    best = data.best(share)
    worst_kept = best.returns.min()
    assert best.steps >= share * data.steps and set(best.returns) == {r for r in data.returns if r >= worst_kept}
    assert best.steps - best.lengths[best.returns.argmin()] < share * data.steps  # one episode less is too little
    assert checked(best, "best") is best


def test_file_holds_the_episodes(tmp_path: Path) -> None:
    data = some_data()
    data.save(tmp_path / "data.npz")
    found = read_trajectories(tmp_path / "data.npz")
    assert found.about == data.about
    for name in ("observation", "action", "reward", "lengths", "terminated", "success", "final"):
        mine, theirs = getattr(data, name), getattr(found, name)
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["data.npz"]


def arrays(data: Trajectories) -> dict[str, np.ndarray]:
    names = ("observation", "action", "reward", "lengths", "terminated", "success", "final")
    return {name: getattr(data, name).copy() for name in names} | {"about": np.array(json.dumps(vars(data.about)))}


def nan(held: dict) -> None:
    held["reward"][3] = np.nan


def infinite(held: dict) -> None:
    held["observation"][0, 0] = np.inf


def long(held: dict) -> None:
    held["lengths"][0] += 1


def short(held: dict) -> None:
    held["reward"] = held["reward"][:-1]


def wild(held: dict) -> None:
    held["action"][0] = 9


def pickled(held: dict) -> None:
    held["reward"] = held["reward"].astype(object)


REFUSED = {
    "no rewards": (lambda held: held.pop("reward"), "has no reward; expected recorded episodes"),
    "no about": (lambda held: held.pop("about"), "has no `about`; expected a file of `spanformer rl collect`"),
    "nan": (nan, "reward holds numbers that are not finite; remove these episodes"),
    "infinite": (infinite, "observation holds numbers that are not finite"),
    "lengths": (long, r"lengths are 20 numbers with the sum .*; expected positive numbers with the sum of the steps"),
    "rows": (short, r"observation has .* rows; expected .*, as the others have"),
    "action": (wild, r"action holds 0 … 9; expected 0 … 3"),
    "dtype": (
        lambda held: held.update(action=held["action"].astype(np.int32)),
        "action is int32 of 1 axes; expected int64 of 1",
    ),
    "pickle": (pickled, r"cannot be read \(Object arrays cannot be loaded"),
    "format": (
        lambda held: held.update(about=np.array(str(held["about"]).replace('"format": 1', '"format": 9'))),
        "has format 9; this version reads format 1: collect it again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_file_is_refused(tmp_path: Path, case: str) -> None:
    change, sentence = REFUSED[case]
    held = arrays(some_data())
    change(held)
    np.savez(tmp_path / "data.npz", allow_pickle=True, **held)
    with pytest.raises(ValueError, match=sentence):
        read_trajectories(tmp_path / "data.npz")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; expected recorded episodes"):
        read_trajectories(tmp_path / "data.npz")
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trajectories(tmp_path / "data.npz")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO with four checkpoints whose training returns are 0, 0, 1 and 1."""
    out = tmp_path_factory.mktemp("ppo") / "maze"
    model = ModelConfig(dim=16, layers=1, heads=2, attention=AttentionConfig(kind="window(8)"))
    ppo = PPOConfig(
        window=12, updates=4, minibatches=2, epochs=1, eval_episodes=0, tensorboard="off", save_every=1, keep=9
    )
    train(RLConfig(str(out), env=EnvConfig("t_maze", 3, 4), model=model, ppo=ppo))
    rows = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    for row in rows:
        if row["event"] == "update":
            row["episode_return"] = float(row["step"] > 2) * 4
    (out / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_level_chooses_checkpoints(run: Path) -> None:
    every = checkpoints(run)
    assert [path.name[-1] for path in every] == list("1234")
    # running means of returns are 0, 0, 4/3 and 2: half of the way is 1
    assert acting(run, "expert") == every[3:] and acting(run, "medium") == every[2:3]
    assert acting(run, "medium-replay") == every[:3]


@pytest.mark.parametrize("level", ["expert", "medium", "medium-replay"])
def test_policy_is_recorded(run: Path, level) -> None:
    data = collect_policy(run, level, 10, 5, env=None, seed=1, greedy=False)
    assert len(checked(data, level)) == 10 and data.about.env == "t_maze" and data.about.length == 3
    again = collect_policy(run, level, 10, 5, env=None, seed=1, greedy=False)
    assert (again.action == data.action).all()


def test_run_without_early_checkpoints_has_no_medium_level(tmp_path: Path, run: Path) -> None:
    import shutil

    copy = tmp_path / "late"
    shutil.copytree(run, copy)
    for path in checkpoints(copy)[:2]:
        shutil.rmtree(path)
    with pytest.raises(ValueError, match=r"keeps no checkpoint from before half of its final return, 1; train it with"):
        acting(copy, "medium")
    with pytest.raises(ValueError, match="has no checkpoints; expected the folder of a run"):
        acting(tmp_path / "nothing", "expert")


def test_minari_holds_the_same_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    data = some_data("graph")
    export_minari(data, "graph/random-v0")
    episodes = list(minari.load_dataset("graph/random-v0").iterate_episodes())
    assert len(episodes) == len(data) == 20
    for e, episode in enumerate(episodes):
        steps = slice(data.starts[e], data.starts[e] + data.lengths[e])
        assert (episode.observations[:-1] == data.observation[steps]).all()
        assert (episode.observations[-1] == data.final[e]).all() and (episode.actions == data.action[steps]).all()
        assert (episode.rewards == data.reward[steps]).all()
        assert episode.terminations[-1] == data.terminated[e] and episode.truncations[-1] != data.terminated[e]
    with pytest.raises(ValueError, match=r"--minari is 'graph/random-v0', which minari refuses"):
        export_minari(data, "graph/random-v0")


def test_missing_minari_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "minari", None)
    out = tmp_path / "data.npz"
    with pytest.raises(SystemExit):
        main(["rl", "collect", "random", "--env", "graph", "--out", str(out), "--minari", "graph/random-v0"])
    assert "minari is not installed; install it with: pip install" in capsys.readouterr().err and not out.exists()


WRONG = {
    "environment": (["random", "--out", "x.npz"], "--env is missing; expected the environment of the random actions"),
    "suffix": (["random", "--env", "graph", "--out", "x.pt"], "--out is 'x.pt'; expected a file name that ends with"),
    "episodes": (
        ["random", "--env", "graph", "--episodes", "0", "--out", "x.npz"],
        "--episodes is 0; expected at least 1",
    ),
    "run": (["out/none", "--out", "x.npz"], "out/none has no checkpoints; expected the folder of a run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_option_of_collect_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, sentence = WRONG[case]
    with pytest.raises(SystemExit):
        main(["rl", "collect", *arguments])
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert torch.get_num_threads() > 0
