"""`spanformer bench rl`: environment steps per second of our PPO with memory, beside sb3-contrib's RecurrentPPO."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.rl.config import EnvConfig, PPOConfig, RLConfig
from spanformer.rl.envs.gym import load_gymnasium, register
from spanformer.rl.ppo import update
from spanformer.rl.run import PolicyRun
from spanformer.train.optim import OptimConfig

LENGTH = 50
DIM = 64
GATED = ModelConfig(
    dim=DIM, layers=2, heads=4, block="gated", norm="layer", attention=AttentionConfig(kind="window(64)"),
    position=PositionConfig(kind="transformer_xl"), feedforward=FeedForwardConfig(kind="relu", dim=128),
)  # fmt: skip
TASKS = {"t_maze": "spanformer/TMaze-v0", "CartPole": "CartPole-v1"}
"""tasks with their ids in gymnasium"""


@dataclass(frozen=True)
class RLBench(BenchOptions):
    """Time an update of a policy: the window is played, and learned from.

        spanformer bench rl --threads 1

    throughput: environment steps per second of Gated Transformer-XL and an LSTM here, and of RecurrentPPO with an LSTM
    of the same width, the same environments side by side, window, epochs and minibatches, and with its default width,
    epochs and batch. Policies here play the T-maze as a batch and also through gymnasium, as RecurrentPPO does. Without
    stable-baselines3 and sb3-contrib, ours alone.
    """

    parts: tuple[str, ...] = ()
    """throughput. Default: all."""
    envs: int = 16
    """Environments side by side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if self.envs < 4 or self.envs % 4:
            raise ValueError(f"envs is {self.envs}; expected a multiple of 4, the number of minibatches")

    @property
    def ppo(self) -> PPOConfig:
        return PPOConfig(window=self.size(128, 8), epochs=3, minibatches=4)


def run(bench: Bench[RLBench]) -> None:
    chosen = bench.options.parts or tuple(PARTS)
    bench.plan(len(TASKS) * len(chosen))
    for name in chosen:
        bench.keep(name, PARTS[name](bench))


def throughput(bench: Bench[RLBench]) -> dict:
    found, o = {}, bench.options
    for task, id in TASKS.items():
        contenders = {
            "GTrXL": ours(o, "transformer", id),
            "LSTM": ours(o, "lstm", id),
        }
        if (peer := theirs(o, id, equal=True)) is not None:
            contenders["RecurrentPPO"] = peer
        if (usual := theirs(o, id, equal=False)) is not None:
            contenders["RecurrentPPO, its defaults"] = usual
        if task == "t_maze":
            contenders["GTrXL, batch"] = ours(o, "transformer", task)
            contenders["LSTM, batch"] = ours(o, "lstm", task)
        timings = bench.compare(task, contenders, shortest=0.0)
        steps = o.ppo.window * o.envs
        rows = {name: steps / timing.median for name, timing in timings.items()}
        found[task] = {name: {"steps_per_second": round(rate)} for name, rate in rows.items()}
        for name, rate in rows.items() if peer is not None else ():
            found[task][name]["ratio"] = round(rate / rows["RecurrentPPO"], 2)
        bench.say(f"{task}: {o.envs} environments, windows of {o.ppo.window} steps")
        for name, row in found[task].items():
            ratio = f"  {row['ratio']:.2f} × RecurrentPPO" if "ratio" in row else ""
            bench.say(f"  {name:26} {row['steps_per_second']:>6,} steps/s{ratio}")
    return found


def ours(o: RLBench, policy: Any, id: str) -> Callable[[], object]:
    """One window and its update."""
    ppo = dataclasses.replace(o.ppo, policy=policy)
    config = RLConfig(env=EnvConfig(id, LENGTH, o.envs), model=GATED, ppo=ppo, optim=OptimConfig(lr=3e-4))
    made = PolicyRun(config, Path("out"), None)

    def step() -> None:
        window, _ = made.actor.collect(ppo.window)
        update(made.policy, made.optimizer, window, ppo, config.optim.global_clip, lambda: None)

    return step


def theirs(o: RLBench, id: str, *, equal: bool) -> Callable[[], object] | None:
    """The same of RecurrentPPO; None if it is not installed. equal: one LSTM of our width for actor and critic, and our
    epochs and minibatches, instead of its defaults."""
    try:
        contrib, vectors = (importlib.import_module(n) for n in ("sb3_contrib", "stable_baselines3.common.vec_env"))
    except ImportError:
        return None
    gymnasium = load_gymnasium()
    register()
    vector = vectors.DummyVecEnv([lambda: gymnasium.make(id, disable_env_checker=True)] * o.envs)
    steps = o.ppo.window * o.envs
    threads = torch.get_num_threads()
    narrow = {"lstm_hidden_size": DIM, "net_arch": [], "shared_lstm": True, "enable_critic_lstm": False}
    changes = {"batch_size": steps // 4, "n_epochs": 3, "policy_kwargs": narrow} if equal else {}
    model = contrib.RecurrentPPO(
        "MlpLstmPolicy", vector, n_steps=o.ppo.window, device="cpu", seed=1, **changes
    )  # fmt: skip
    torch.set_num_threads(threads)
    return lambda: model.learn(steps, reset_num_timesteps=False)


PARTS = {"throughput": throughput}
OPTIONS = RLBench
