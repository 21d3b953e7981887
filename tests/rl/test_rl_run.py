"""Runs of PPO: exact resume, run files, events, commands and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.cli.main import main
from spanformer.cli.runfile import read_run
from spanformer.core.events import FILE
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.folder import open_part
from spanformer.report.policy import read_policy
from spanformer.rl.config import EnvConfig, PPOConfig, RLConfig
from spanformer.rl.envs.batch import Step
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.policy import Policy
from spanformer.rl.ppo import update
from spanformer.rl.rollout import Actor
from spanformer.rl.run import train
from spanformer.rl.saving import LOST
from spanformer.train.optim import OptimConfig

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("runs/rl/*.toml"))
MODEL = ModelConfig(dim=16, layers=1, heads=2, block="gated", attention=AttentionConfig(max_span=32, init=0.3))
SMALL = PPOConfig(window=20, updates=4, minibatches=2, epochs=2, eval_episodes=3, tensorboard="off", save_every=2)


def small(out: Path, policy: str = "transformer", **changes) -> RLConfig:
    env = EnvConfig("t_maze", 5, 4)
    return replace(RLConfig(str(out), env=env, model=MODEL, ppo=replace(SMALL, policy=policy)), **changes)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:08d}"
    parts = ("model", "optimizer", "memory", "actor", "episodes")
    return {f"{part}/{name}": t for part in parts for name, t in dict(open_part(folder, part)).items()}


@pytest.mark.parametrize("policy", ["transformer", "lstm", "mlp"])
def test_resumed_run_repeats_every_bit(tmp_path: Path, policy: str) -> None:
    whole, pieces = small(tmp_path / "whole", policy), small(tmp_path / "pieces", policy)
    train(whole)
    train(replace(pieces, ppo=replace(pieces.ppo, updates=2)))
    train(replace(pieces, resume=True))
    a, b = weights(tmp_path / "whole", 4), weights(tmp_path / "pieces", 4)
    assert a.keys() == b.keys() and len(a) > 10
    assert all(torch.equal(a[name], b[name]) for name in a)
    rows = [read_policy(tmp_path / name).updates for name in ("whole", "pieces")]
    for one, two in zip(*rows, strict=True):
        for key in ("policy_loss", "value_loss", "entropy", "kl", "grad_norm", "env_steps"):
            assert one.record[key] == two.record[key], key


def test_resumed_gymnasium_run_begins_new_episodes(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    config = small(tmp_path / "run", env=EnvConfig("CartPole-v1", 0, 2))
    train(replace(config, ppo=replace(config.ppo, updates=2)))
    train(replace(config, resume=True))
    notes = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [row["text"] for row in notes if row["event"] == "note"] == [LOST]


@pytest.mark.parametrize("name", FILES)
def test_run_file_takes_an_update(tmp_path: Path, name: str) -> None:
    config = read_run(RLConfig, "spanformer rl train", [str(ROOT / name)])
    for begin, package in {"popgym": "popgym", "LunarLander": "Box2D"}.items():
        if config.env.id.startswith(begin):
            pytest.importorskip(package)
    ppo = replace(config.ppo, updates=1, window=12, minibatches=2, eval_episodes=2, tensorboard="off", threads=1)
    env = replace(config.env, length=4, count=4)
    before = torch.get_num_threads()
    try:
        result = train(replace(config, out=str(tmp_path / "run"), ppo=ppo, env=env))
    finally:
        torch.set_num_threads(before)
    assert result.updates == 1 and result.played is not None and result.played.episodes == 2
    (row,) = read_policy(tmp_path / "run").updates
    assert row.number("grad_norm") > 0 and (len(row.record["spans"]) > 0) == ("spans" in name)


def test_run_files_are_found() -> None:
    assert {"runs/rl/t_maze.toml", "runs/rl/memory_chain.toml"} <= set(FILES)


class Cut:
    """One row; every second step is cut by a time limit, and its observation tells it."""

    name, rows, observation, actions = "cut", 1, 1, 2

    def __init__(self) -> None:
        self.time = 0

    def seed(self, seed: int) -> None: ...

    def reset(self) -> np.ndarray:
        return np.zeros((1, 1), np.float32)

    def step(self, action: np.ndarray) -> Step:
        self.time += 1
        cut = self.time % 2 == 0
        final = np.full((1, 1), 7.0 if cut else 1.0, np.float32)
        now = self.reset() if cut else final
        yes, no = np.array([cut]), np.array([False])
        return Step(now, np.ones(1, np.float32), no, yes, final, np.array([np.nan], np.float32))

    def arrays(self) -> None:
        return None

    def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        return self.reset()


def test_cut_episode_is_continued_by_the_value_of_its_last_observation() -> None:
    torch.manual_seed(0)
    policy = Policy("mlp", MODEL, 1, 2)
    window, _ = Actor(Cut(), policy).collect(5)
    observations = torch.tensor([1.0, 7.0, 1.0, 7.0, 1.0])  # after each step, in its own episode
    with torch.no_grad():
        x = policy.core(policy.encode(observations[None, :, None]), None, None)[0]
        expected = policy.critic(x)[..., 0]
    assert (window.next_value - expected).abs().max() < 1e-6
    assert window.ended.tolist() == [[False, True, False, True, False]] and not window.terminated.any()


def test_value_after_a_cut_reads_the_memory_of_its_own_episode() -> None:
    torch.manual_seed(0)
    policy = Policy("transformer", MODEL, 1, 2)
    window, _ = Actor(Cut(), policy).collect(4)
    seen = window.seen
    assert seen.episode.tolist() == [[0, 0, 1, 1]] and seen.action[0, 2] == -1 and seen.reward[0, 2] == 0
    longer = seen._replace(
        observation=torch.cat([seen.observation[:, :2], torch.full((1, 1, 1), 7.0)], 1),
        action=torch.cat([seen.action[:, :2], window.action[:, 1:2]], 1),
        reward=torch.cat([seen.reward[:, :2], torch.ones(1, 1)], 1),
        episode=torch.zeros(1, 3, dtype=torch.int64),
    )
    with torch.no_grad():
        expected = policy(longer, policy.start(1)).value[0, 2]
    assert abs(float(window.next_value[0, 1] - expected)) < 1e-5


def test_reward_scale_divides_what_is_learned() -> None:
    learned = []
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        policy = Policy("mlp", MODEL, 1, 2)
        window, _ = Actor(Cut(), policy).collect(4)
        window = window._replace(reward=window.reward * scale)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        update(policy, optimizer, window, replace(SMALL, minibatches=1, reward_scale=scale), 1.0, lambda: None)
        learned.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    assert torch.equal(*learned)


def test_policy_learns_a_short_memory_chain(tmp_path: Path) -> None:
    """An LSTM needs some seconds for a chain of 3; without memory half of the answers are right."""
    env, ppo = EnvConfig("memory_chain", 3, 16), replace(SMALL, window=32, updates=60, eval_episodes=100, save_every=0)
    model = replace(MODEL, dim=32)
    result = train(RLConfig(str(tmp_path / "run"), env=env, model=model, ppo=replace(ppo, policy="lstm"),
                            optim=OptimConfig(lr=3e-3, warmup=10, weight_decay=0.0)))  # fmt: skip
    assert result.played is not None and result.played.success > 0.9


def test_commands_train_play_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    file = ROOT / "runs/rl/t_maze_spans.toml"
    few = "--ppo.updates 2 --ppo.window 24 --env.length 4 --env.count 4 --ppo.eval-episodes 4 --ppo.tensorboard off"
    main(["rl", "train", str(file), *few.split()])
    assert "4 episodes played: return" in capsys.readouterr().out
    main(["rl", "eval", "out/t_maze_spans", "--episodes", "4"])
    assert "t_maze: return" in capsys.readouterr().out
    main(["rl", "report", "out/t_maze_spans"])
    assert (tmp_path / "out/t_maze_spans/report/curves.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["rl", "eval", "out/t_maze_spans", "--env", "memory_chain"])
    said = " ".join(capsys.readouterr().err.split())
    assert "was trained in t_maze with 4 numbers of observation and 4 actions; memory_chain has 3 and 2" in said


def test_checkpoint_of_another_environment_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path / "run")
    train(replace(config, ppo=replace(config.ppo, updates=1)))
    with pytest.raises(ValueError, match=r"was trained in t_maze with 4 numbers .*memory_chain has 3 and 2"):
        train(replace(config, resume=True, env=EnvConfig("memory_chain", 5, 4)))
    with pytest.raises(
        ValueError, match=r"was trained in t_maze, and env.id is 'spanformer/TMaze-v0'; expected the sa"
    ):
        pytest.importorskip("gymnasium")
        train(replace(config, resume=True, env=EnvConfig("spanformer/TMaze-v0", 5, 4)))
    with pytest.raises(ValueError, match=r"env.count is 2; .*has 4 environments: expected the same"):
        train(replace(config, resume=True, env=EnvConfig("t_maze", 5, 2)))


REFUSED = {
    "rows": (lambda: RLConfig(env=EnvConfig(count=6)), "env.count is 6; expected a multiple of ppo.minibatches, 4"),
    "gamma": (lambda: PPOConfig(gamma=1.5), "ppo.gamma is 1.5; expected 0 … 1"),
    "reward scale": (lambda: PPOConfig(reward_scale=0.0), "ppo.reward_scale is 0.0; expected a finite number above 0"),
    "window": (lambda: PPOConfig(window=0), "ppo.window is 0; expected at least 1"),
    "encoder": (lambda: RLConfig(model=ModelConfig(kind="encoder")), "a policy needs model.kind 'lm'"),
    "environment": (lambda: make_batch("Nowhere-v0", 1, 0), "env.id is 'Nowhere-v0', which gymnasium cannot make"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_setting_is_refused(case: str) -> None:
    if case == "environment":
        pytest.importorskip("gymnasium")
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        make()


def test_absolute_positions_are_refused() -> None:
    position = replace(MODEL.position, kind="sinusoidal")
    with pytest.raises(ValueError, match=r"model.position.kind is 'sinusoidal'; expected a relative one"):
        RLConfig(model=replace(MODEL, position=position))
