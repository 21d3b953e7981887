"""Runs of `rl imitate`: exact resume, run files, events, reports, commands and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.bench.decision import METHODS, recipe
from spanformer.cli.main import main
from spanformer.cli.runfile import read_run
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.folder import open_part
from spanformer.report.imitation import read_imitation
from spanformer.rl.decision_config import ImitateConfig, ImitationConfig
from spanformer.rl.decision_run import ask, imitate
from spanformer.rl.decision_saving import Loaded
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.recording import random_player, record
from spanformer.rl.trajectories import About, Trajectories, read_trajectories

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("runs/rl/decision/*.toml"))
MODEL = ModelConfig(dim=16, layers=1, heads=2, attention=AttentionConfig(max_span=32, init=0.3, dropout=0.1))
SMALL = ImitateConfig(
    window=5, batch=4, steps=6, eval_episodes=4, log_every=2, save_every=2, tensorboard="off", threads=1
)  # fmt: skip


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random episodes of each environment."""
    folder, found = tmp_path_factory.mktemp("data"), {}
    for name in ("graph", "key_to_door", "t_maze"):
        env = make_batch(name, 5, 4)
        env.seed(1)
        recorded = record(random_player(env, 1), 5, 20, About(name, 4, env.actions, False, "random actions", 1))
        recorded.save(folder / f"{name}.npz")
        found[name] = str(folder / f"{name}.npz")
    return found


def small(out: Path, path: str, **changes) -> ImitationConfig:
    return ImitationConfig(str(out), imitate=replace(SMALL, data=path, **changes), model=MODEL)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:08d}"
    parts = ("model", "optimizer") + (("memory", "streams") if "episode" in out.name else ())
    return {f"{part}/{name}": t for part in parts for name, t in dict(open_part(folder, part)).items()}


@pytest.mark.parametrize("context", ["window", "episode"])
def test_resumed_run_repeats_every_bit(tmp_path: Path, data: dict[str, str], context) -> None:
    path = data["key_to_door"]
    whole, pieces = (small(tmp_path / f"{name}-{context}", path, context=context) for name in ("whole", "pieces"))
    imitate(whole)
    stopped = ImitationRunUntil(pieces, 4)
    assert stopped == 4
    imitate(replace(pieces, resume=True))
    a, b = (weights(tmp_path / f"{name}-{context}", 6) for name in ("whole", "pieces"))
    assert a.keys() == b.keys() and len(a) > 10 and all(torch.equal(a[name], b[name]) for name in a)
    rows = [read_imitation(tmp_path / f"{name}-{context}") for name in ("whole", "pieces")]
    for one, two in zip(rows[0].steps, rows[1].steps, strict=True):
        assert all(
            one.record[key] == two.record[key] for key in ("step", "loss", "penalty", "grad_norm", "lr", "spans")
        )
    assert rows[0].asked == rows[1].asked and len(rows[0].asked) == 1


def ImitationRunUntil(config: ImitationConfig, step: int) -> int:
    """A run that a signal ends after some steps."""
    from spanformer.core.events import ProgressEvent
    from spanformer.rl import decision_run

    runs: list[decision_run.ImitationRun] = []
    original = decision_run.ImitationRun.__init__

    def keep(self, *arguments) -> None:
        original(self, *arguments)
        runs.append(self)

    def watch(event: object) -> None:
        if isinstance(event, ProgressEvent) and event.done == step:
            runs[0].signals.caught = 15

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision_run.ImitationRun, "__init__", keep)
        result = imitate(config, watch=watch)
    assert result.signal == 15 and not result.asked
    return result.steps


def test_final_evaluation_draws_actions(tmp_path: Path, data: dict[str, str]) -> None:
    config = small(tmp_path / "run", data["key_to_door"], sample=True, eval_episodes=40)
    asked = imitate(config).asked[0]
    loaded, env = Loaded(tmp_path / "run"), make_batch("key_to_door", 40, 4)
    drawn, best = (
        ask(loaded.model, config, env, asked.target, 40, SMALL.seed + 10_000, greedy=greedy) for greedy in (False, True)
    )
    assert asked.length == drawn.lengths.mean() and asked.episode_return == drawn.returns.mean()
    assert not np.array_equal(drawn.lengths, best.lengths)


@pytest.mark.parametrize("name", FILES)
def test_run_file_takes_a_step(tmp_path: Path, data: dict[str, str], name: str) -> None:
    config = read_run(ImitationConfig, "spanformer rl imitate", [str(ROOT / name)])
    env = "graph" if "graph" in name else "key_to_door"
    settings = replace(
        config.imitate, data=data[env], steps=1, batch=4, window=6, eval_episodes=2, tensorboard="off"
    )  # fmt: skip
    result = imitate(replace(config, out=str(tmp_path / "run"), imitate=settings))
    assert result.steps == 1 and len(result.asked) == len(config.imitate.targets) and result.asked[0].episodes == 2
    (row,) = read_imitation(tmp_path / "run").steps
    assert row.number("grad_norm") > 0 and (len(row.record["spans"]) > 0) == ("spans" in name)


def test_run_files_are_those_of_the_benchmark() -> None:
    expected = {"graph": recipe("graph"), "key_to_door": METHODS["decision"], "key_to_door_spans": METHODS["spans"]}
    assert {Path(name).stem for name in FILES} == {*expected, "lander"}
    for name, config in expected.items():
        assert read_run(ImitationConfig, "rl imitate", [str(ROOT / f"runs/rl/decision/{name}.toml")]) == config


def test_best_episodes_are_cloned(tmp_path: Path, data: dict[str, str]) -> None:
    config = small(tmp_path / "run", data["graph"], method="cloning", top=0.2)
    result = imitate(config)
    assert math.isnan(result.asked[0].target) and Loaded(tmp_path / "run").model.ask is None
    first = read_imitation(tmp_path / "run")
    assert math.isnan(first.asked[0].target) and first.returns == (-8, -1)


def test_warm_up_is_at_most_a_tenth_of_the_run(tmp_path: Path, data: dict[str, str]) -> None:
    imitate(small(tmp_path / "run", data["graph"], steps=30, save_every=0, log_every=1, eval_episodes=0))
    rates = [row.number("lr") for row in read_imitation(tmp_path / "run").steps]
    assert np.argmax(rates) == 2 and rates[0] < rates[1] < rates[2] and (np.diff(rates[2:]) < 0).all()


@pytest.mark.slow
def test_model_learns_what_return_means(tmp_path: Path) -> None:
    """A reward of 1 for each step with action 1: asked for 0 or 4, it must act otherwise."""
    from spanformer.rl.decision_run import ask
    from spanformer.rl.envs.batch import Step

    random = np.random.default_rng(0)
    action = random.integers(0, 2, 400)
    lengths = np.full(100, 4)
    seen = np.zeros((400, 1), np.float32)
    Trajectories(
        About("memory_chain", 3, 2, False, "coins", 0), seen, action, action.astype(np.float32), lengths,
        np.ones(100, bool), np.full(100, np.nan, np.float32), seen[:100],
    ).save(tmp_path / "data.npz")  # fmt: skip
    config = small(
        tmp_path / "run", str(tmp_path / "data.npz"), steps=200, batch=32, window=4, eval_episodes=0, save_every=0
    )
    imitate(replace(config, optim=replace(config.optim, lr=5e-3)))

    class Coins:
        name, rows, observation, actions, time = "coins", 3, 1, 2, 0

        def seed(self, seed: int) -> None: ...

        def arrays(self) -> None: ...

        def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
            return self.reset()

        def reset(self) -> np.ndarray:
            self.time = 0
            return np.zeros((3, 1), np.float32)

        def step(self, action: np.ndarray) -> Step:
            self.time += 1
            over, no = np.full(3, self.time == 4), np.zeros(3, bool)
            zeros = np.zeros((3, 1), np.float32)
            return Step(zeros, action.astype(np.float32), over, no, zeros, np.full(3, np.nan, np.float32))

    loaded = Loaded(tmp_path / "run")
    got = [ask(loaded.model, loaded.config, Coins(), float(target), 3, 1).returns.mean() for target in (0, 2, 4)]
    assert got[0] == 0 and got[2] == 4 and 1 <= got[1] <= 3


def test_commands_record_train_ask_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    few = ["--length", "6", "--episodes", "20"]
    main(["rl", "collect", "random", "--env", "graph", *few, "--out", "out/data/graph.npz"])
    assert "20 episodes of graph by random actions" in capsys.readouterr().out
    few = "--imitate.steps 2 --imitate.eval-episodes 4 --imitate.tensorboard off --imitate.batch 4"
    main(["rl", "imitate", str(ROOT / "runs/rl/decision/graph.toml"), *few.split()])
    assert "asked -8.000, got" in capsys.readouterr().out
    main(["rl", "eval", "out/graph", "--target", "-12", "5", "--episodes", "4", "--picture", "out/asked.png"])
    said = capsys.readouterr().out
    assert "graph: asked -12.000, got -" in said and "asked for beyond them: 5" in said
    main(["rl", "report", "out/graph"])
    assert (tmp_path / "out/graph/report/asked.png").stat().st_size > 1000 < (tmp_path / "out/asked.png").stat().st_size
    with pytest.raises(SystemExit):
        main(["rl", "eval", "out/graph", "--env", "t_maze", "--episodes", "4"])
    said = " ".join(capsys.readouterr().err.split())
    assert "was trained in graph with 20 numbers of observation and 4 actions; t_maze has 4 numbers" in said
    with pytest.raises(SystemExit):
        main(["report", "out/graph"])
    assert "draw it with: spanformer rl report out/graph" in " ".join(capsys.readouterr().err.split())


def test_checkpoint_of_other_data_is_refused(tmp_path: Path, data: dict[str, str]) -> None:
    config = small(tmp_path / "run", data["graph"], steps=1)
    imitate(config)
    other = replace(config, resume=True, imitate=replace(config.imitate, data=data["t_maze"], steps=2))
    with pytest.raises(
        ValueError, match=r"was trained in graph with 20 numbers .* and 4 actions; t_maze has 4 numbers"
    ):
        imitate(other)
    clone = replace(config, resume=True, imitate=replace(config.imitate, method="cloning", steps=2))
    with pytest.raises(ValueError, match=r"does not fit this model: .*expected the same \[model\], data and imitate"):
        imitate(clone)


def continuous_data(path: Path) -> str:
    """Steps whose action is half of the first number of the observation."""
    seen = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    Trajectories(
        About("Pendulum-v1", 0, 1, True, "half", 0), seen, np.tanh(seen[:, :1] / 2), np.zeros(400, np.float32),
        np.full(40, 10), np.zeros(40, bool), np.full(40, np.nan, np.float32), seen[:40],
    ).save(path)  # fmt: skip
    return str(path)


@pytest.mark.parametrize("context", ["window", "episode"])
def test_continuous_actions_are_learned(tmp_path: Path, context) -> None:
    path = continuous_data(tmp_path / "data.npz")
    config = small(
        tmp_path / "run", path, context=context, steps=40, batch=8, eval_episodes=0, save_every=0, log_every=20
    )  # fmt: skip
    imitate(replace(config, optim=replace(config.optim, lr=5e-3)))
    losses = [row.number("loss") for row in read_imitation(tmp_path / "run").steps]
    assert losses[-1] < losses[0] / 2


def test_continuous_actions_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Recorded as −1 … 1 of the bounds, −2 … 2 here."""
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    few = "random --env Pendulum-v1 --continuous --episodes 2 --out data.npz"
    main(["rl", "collect", *few.split()])
    found, env = read_trajectories("data.npz"), gymnasium.make("Pendulum-v1")
    assert found.about.continuous and found.action.shape == (400, 1) and 0.9 < np.abs(found.action).max() <= 1
    seen = env.reset(seed=4096)[0]
    for t in range(20):
        assert np.allclose(found.observation[t], seen, atol=1e-5)
        seen, reward, *_ = env.step(2 * found.action[t])
        assert np.isclose(found.reward[t], reward, atol=1e-4)
    imitate(small(tmp_path / "run", "data.npz", steps=2, eval_episodes=2))
    main(["rl", "eval", "run", "--episodes", "2", "--target", "-500"])
    assert "Pendulum-v1: asked -500.000, got -" in capsys.readouterr().out
    with pytest.raises(ValueError, match="graph has discrete actions; expected an environment of gymnasium with"):
        make_batch("graph", 1, 3, continuous=True)
    with pytest.raises(ValueError, match=r"whose actions are Discrete.*expected a bounded vector"):
        make_batch("CartPole-v1", 1, 0, continuous=True)


def test_data_of_another_environment_is_refused_before_training(tmp_path: Path, data: dict[str, str]) -> None:
    whole = read_trajectories(data["graph"])
    replace(whole, about=replace(whole.about, env="t_maze")).save(tmp_path / "data.npz")
    with pytest.raises(ValueError, match=r"its environment t_maze has 4 numbers .*or imitate.eval_episodes 0"):
        imitate(small(tmp_path / "run", str(tmp_path / "data.npz")))


REFUSED = {
    "window": (lambda: ImitateConfig(window=0), "imitate.window is 0; expected at least 1"),
    "top": (lambda: ImitateConfig(top=0.0), "imitate.top is 0.0; expected a share of the steps"),
    "targets": (lambda: ImitateConfig(targets=(math.nan,)), r"imitate.targets is \[nan\]; expected finite numbers"),
    "clone": (lambda: ImitateConfig(targets=(1.0,), method="cloning"), "'cloning', which is asked for nothing"),
    "scale": (lambda: ImitateConfig(scale=-1.0), "imitate.scale is -1.0; expected a finite number, 0 or more"),
    "encoder": (lambda: ImitationConfig(model=ModelConfig(kind="encoder")), "a Decision Transformer needs model.kind"),
    "log_scale": (
        lambda: ImitationConfig(model=ModelConfig(position=PositionConfig(log_scale=64))),
        "model.position.log_scale is 64; expected 0, since episodes begin anywhere in the rows",
    ),
    "bias": (
        lambda: ModelConfig(attention=AttentionConfig(bias=True), depth=replace(ModelConfig().depth, kind="act")),
        "model.attention.bias is set, and model.depth.kind is 'act'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_setting_is_refused(case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        make()
