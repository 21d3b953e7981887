"""`spanformer bench decision`: what a Decision Transformer learns from random episodes, beside cloning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.core.events import ProgressEvent
from spanformer.model.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
)
from spanformer.rl.decision_config import ImitateConfig, ImitationConfig
from spanformer.rl.decision_play import Asked
from spanformer.rl.decision_run import ask, imitate
from spanformer.rl.decision_saving import Loaded
from spanformer.rl.envs.batch import BatchEnv
from spanformer.rl.envs.graph import distances
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.recording import ROWS, random_player, record, seed_player
from spanformer.rl.trajectories import About, Trajectories
from spanformer.train.optim import OptimConfig

EPISODES = 400
"""of each evaluation"""
WALK = 40
"""most steps of a random walk, and of an episode in the graph"""
TOP = 0.05
"""share of the steps that %BC learns from"""


@dataclass(frozen=True)
class DecisionBench(BenchOptions):
    """Learn from random episodes, and measure what is reached when the best is asked for.

        spanformer bench decision --parts graph --threads 1
        spanformer bench decision --parts key_to_door --seeds 1 2 3 --threads 1

    graph: share of start nodes from which a Decision Transformer needs at most 0.2 steps more than the shortest path,
    after 1,000 random walks; asked for −1, and for the best return that the data holds from that node. key_to_door:
    share of right episodes after 1,000 and 10,000 random ones, with windows of 20 steps and with learned spans, beside
    cloning of all episodes and of the best ones that hold 5 % of the steps (%BC). Always the final checkpoint.
    """

    parts: tuple[str, ...] = ()
    """graph, key_to_door. Default: all."""
    seeds: tuple[int, ...] = (1,)
    """Random seeds of data, weights and chance; the results keep each."""
    episodes: tuple[int, ...] = (1000, 10_000)
    """Random episodes of key_to_door."""
    methods: tuple[str, ...] = ()
    """decision, spans, cloning, best. Default: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if unknown := [each for each in self.methods if each not in METHODS]:
            raise ValueError(f"methods holds {unknown[0]!r}; expected any of {', '.join(METHODS)}")
        if not self.seeds or not self.episodes or min(self.episodes) < 1:
            raise ValueError("seeds and episodes must each hold a number, and episodes at least 1")


def run(bench: Bench[DecisionBench]) -> None:
    for name in bench.options.parts or PARTS:
        PARTS[name](bench)


def graph(bench: Bench[DecisionBench]) -> None:
    found = {}
    for seed in bench.options.seeds:
        data = random_episodes(bench, "graph", WALK, 1000, seed)
        loaded = trained(bench, data, recipe("graph"), f"graph-{seed}", seed)
        env = make_batch("graph", bench.options.size(100, 20), WALK)
        found[str(seed)] = {
            "asked −1": near(loaded, env, lambda first: np.full(len(first), -1.0), bench),
            "asked the data's best": near(loaded, env, best_of(data), bench),
        }
        bench.keep("graph", found)
        bench.say(f"graph, seed {seed}: {found[str(seed)]}")


def best_of(data: Trajectories) -> Asked:
    """What to ask for in the graph: the best return-to-go of the data from the same node."""
    best = np.full(data.observation.shape[1], data.returns_to_go.min())
    np.maximum.at(best, data.observation.argmax(1), data.returns_to_go)
    return lambda first: best[first.argmax(1)]


def near(loaded: Loaded, env: BatchEnv, asked: Asked, bench: Bench[DecisionBench]) -> dict:
    """Over start nodes: the share with at most 0.2 steps beyond the shortest path, and the mean of these steps."""
    played = ask(loaded.model, loaded.config, env, asked, bench.options.size(EPISODES, 20), 77)
    start = played.first.argmax(1)
    beyond = [float(played.lengths[start == n].mean()) - int(distances()[n]) for n in sorted(set(start.tolist()))]
    return {"starts": len(beyond), "near": float(np.mean(np.array(beyond) <= 0.2)), "beyond": float(np.mean(beyond))}


def key_to_door(bench: Bench[DecisionBench]) -> None:
    o = bench.options
    found = bench.file.found("key_to_door") or {}
    for seed in o.seeds:
        for count in o.episodes:
            data = random_episodes(bench, "key_to_door", 8, o.size(count, 20), seed)
            for method in o.methods or METHODS:
                title = f"key_to_door-{count}-{method}-{seed}"
                loaded = trained(bench, data, METHODS[method], title, seed)
                env = make_batch("key_to_door", o.size(100, 10), 8)
                target = math.nan if loaded.config.imitate.method == "cloning" else 1.0
                rows = {}
                for name, greedy in (("greedy", True), ("drawn", False)):
                    played = ask(loaded.model, loaded.config, env, target, o.size(EPISODES, 10), 77, greedy=greedy)
                    rows[name] = float(played.success.mean())
                spans = [z for layer in loaded.model.stack.spans() for z in layer if z is not None]
                rows |= {"data": float(data.success.mean())} | ({"spans": spans} if spans else {})
                found = {**found, title: rows}
                bench.keep("key_to_door", found)
                bench.say(f"{title}: {rows}")


PARTS = {"graph": graph, "key_to_door": key_to_door}


def recipe(env: str) -> ImitationConfig:
    """That of runs/rl/decision/graph.toml and key_to_door.toml."""
    doors = env == "key_to_door"
    model = ModelConfig(
        dim=64, layers=2, heads=2, norm="layer", position=PositionConfig(kind="none"),
        attention=AttentionConfig(kind="full", max_span=60 if doors else 30, bias=True, dropout=0.1),
        feedforward=FeedForwardConfig(kind="relu", bias=True, dropout=0.1), embedding=EmbeddingConfig(dropout=0.1),
    )  # fmt: skip
    settings = ImitateConfig(
        data=f"out/data/{env}.npz", window=20 if doors else 10, steps=1000 if doors else 600, threads=1,
        targets=(1.0,) if doors else (-1.0, -2.0, -4.0, -8.0),
    )  # fmt: skip
    return ImitationConfig(imitate=settings, model=model, optim=OptimConfig(lr=1e-3, clip=0.25))


def with_spans(config: ImitationConfig) -> ImitationConfig:
    """That of runs/rl/decision/key_to_door_spans.toml."""
    attention = replace(config.model.attention, kind="adaptive_span", max_span=128, init=0.3, penalty=2e-5)
    return replace(
        config, imitate=replace(config.imitate, context="episode"), model=replace(config.model, attention=attention),
        optim=replace(config.optim, span_lr=1e-2),
    )  # fmt: skip


def cloning(config: ImitationConfig, top: float) -> ImitationConfig:
    return replace(config, imitate=replace(config.imitate, method="cloning", targets=(), top=top))


DOORS = recipe("key_to_door")
METHODS = {"decision": DOORS, "spans": with_spans(DOORS), "cloning": cloning(DOORS, 1.0), "best": cloning(DOORS, TOP)}


def random_episodes(bench: Bench[DecisionBench], env: str, length: int, count: int, seed: int) -> Trajectories:
    """What `spanformer rl collect random` records, also written into the folder of the runs."""
    count = bench.options.size(count, 20)
    rows = max(n for n in range(1, min(ROWS, count) + 1) if count % n == 0)
    batch = make_batch(env, rows, length)
    seed_player(batch, seed)
    data = record(
        random_player(batch, seed), rows, count, About(env, length, batch.actions, False, "random actions", seed)
    )
    data.save(path_of(bench, env, count, seed))
    return data


def path_of(bench: Bench[DecisionBench], env: str, count: int, seed: int) -> Path:
    return bench.file.path.with_suffix("") / f"{env}-{count}-{seed}.npz"


def trained(
    bench: Bench[DecisionBench], data: Trajectories, config: ImitationConfig, title: str, seed: int
) -> Loaded:  # fmt: skip
    """The final checkpoint of a run in the folder beside the results; a run that is there is continued."""
    out = bench.file.path.with_suffix("") / title
    settings = replace(
        config.imitate, data=str(path_of(bench, data.about.env, len(data), seed)), seed=seed, eval_episodes=0,
        steps=bench.options.size(config.imitate.steps, 2), threads=bench.options.threads, tensorboard="off",
    )  # fmt: skip

    def watch(event: object) -> None:
        if isinstance(event, ProgressEvent):
            bench.report(f"{title}: {event.title}", event.done, event.total)

    if imitate(replace(config, out=str(out), resume=True, imitate=settings), watch=watch).signal:
        raise KeyboardInterrupt  # the run is saved, and the same command continues it
    return Loaded(out)


OPTIONS = DecisionBench
