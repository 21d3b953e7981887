"""`spanformer bench depth`: what adaptive depth gives: layers by difficulty, longer words, exits and their speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.bench.training import trained
from spanformer.core.ranks import spearman
from spanformer.data.config import DataConfig
from spanformer.data.tasks import Task, parse_task
from spanformer.data.tasks.chase import Chase
from spanformer.model.config import (
    AttentionConfig,
    DepthConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
)
from spanformer.model.lm import LM
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate_task
from spanformer.train.optim import OptimConfig

TEXTS, SEED = 200, 11


@dataclass(frozen=True)
class DepthBench(BenchOptions):
    """Train small models of adaptive depth and measure what depth does for them.

        spanformer bench depth --parts chase words --threads 1
        spanformer bench depth --parts exits calm --data enwik8.gz

    chase: a universal model with adaptive computation time follows pointers 1 to 6 times; layers and right answers by
    hops. words: universal and plain models of about equal size repeat and reverse words of up to 40 symbols, and are
    asked for 80. ponder: the time of a pass when tokens halt sooner. span_depth: dynamic spans, exits, both and neither
    under one price, with their bits and operations per token. exits: an 8-layer language model of enwik8 with exits and
    one without, the same steps. calm: exits of that model, calibrated to δ 0.25 and 0.1, and their tokens per second.
    pairs: three classifiers by two oracles, on the states of that model. All are trained once, with --seed, and the
    result file holds each seed beside the others; exits and single continue where they stopped.
    """

    parts: tuple[str, ...] = ()
    """chase, words, ponder, span_depth, exits, calm and pairs (after exits). Default: all."""
    steps: int = 0
    """Training steps. Default: what the part needs (with --quick: 2)."""
    seed: int = 1
    """Random seed of the weights and of the order of the texts."""
    positions: tuple[Literal["sinusoids", "from_zero", "shaw", "sharper"], ...] = ("sharper",)
    """Positions of words: sinusoids that begin at random places in training (the paper's), sinusoids from 0 on,
    distances that end at 2 (shaw), or these with scores that grow with the logarithm of the position (sharper)."""
    data: str = ""
    """Copy of enwik8 on disk; by default it is downloaded."""
    source: str = "enwik8"
    """Training text of exits: a named corpus, a file, a folder or a glob."""
    width: int = 256
    """Width of the model of exits, calm and pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; expected 0 or more")
        if self.width < 8 or self.width % 8:
            raise ValueError(f"width is {self.width}; expected a multiple of 8, for 4 heads of an even size")

    def taken(self, whole: int) -> int:
        """Training steps of a part that needs `whole`."""
        return self.steps or self.size(whole, 2)


def run(bench: Bench[DepthBench]) -> None:
    for name in bench.options.parts or PARTS:
        found = PARTS[name](bench)
        bench.keep(f"{name}, seed {bench.options.seed}", found)
        bench.say(f"{name}:")
        for row, values in found.items():
            bench.say(f"  {row}: {values}")


def chase(bench: Bench[DepthBench]) -> dict:
    """Right answers and layers by hops."""
    o, task = bench.options, Chase(nodes=8, hops=6, questions=bench.options.size(8, 2), search=1)
    depth = DepthConfig(kind="act", cost=0.003, warmup=o.taken(4000))
    model = replace(small(64, 8, task), stack="universal", depth=depth)
    lm = trained(bench, recipe(bench, model, task, o.taken(4000)), folder(bench, "chase"), "chase")
    assert lm.depth is not None
    right, layers = {}, {}
    for hops in range(1, task.hops + 1):
        some = replace(task, hops=hops, fewest=hops)
        texts = some.draw(np.random.default_rng(SEED), o.size(TEXTS, 4))
        right[str(hops)] = evaluate_task(lm, texts, some.counted, batch=len(texts)).exact
        latest = lm.depth.latest
        assert latest is not None
        layers[str(hops)] = float(latest[:, some.counted].double().mean())
    ratio = layers[str(task.hops)] / layers["1"]
    rank = round(spearman(list(layers.values()), range(len(layers))), 3)
    return {"right": right, "layers": layers, "spearman": rank, "ratio": ratio, "most": model.layers,
            "steps": o.taken(4000)}  # fmt: skip


def words(bench: Bench[DepthBench]) -> dict:
    """Right answers at the longest trained length, half as much again and twice that, of a universal and a plain
    model."""
    o, found = bench.options, {}
    for name in ("repeat", "reverse"):
        length = o.size(40, 4)
        task = parse_task(f"{name}(symbols={length}, fewest=1)")
        assert task is not None
        models = {
            "universal": replace(small(64, 4, task, heads=2), stack="universal"), "plain": small(32, 4, task, heads=2)
        }  # fmt: skip
        for (kind, model), (place, position) in itertools.product(models.items(), places(length, o.positions).items()):
            title = f"{name} {kind} {place}"
            model = replace(model, position=position)
            steps = o.taken(5000)
            lm = trained(bench, recipe(bench, model, task, steps), folder(bench, title.replace(" ", "-")), title)
            parameters = sum(p.numel() for p in lm.blocks.parameters())
            asked = (length, 3 * length // 2, 2 * length)
            right = {str(n): share(lm, replace(task, symbols=n, fewest=0), o) for n in asked}  # type: ignore[call-arg]
            found[title] = {"right": right, "parameters": parameters, "steps": steps}
    return found


def places(length: int, names: tuple[str, ...]) -> dict[str, PositionConfig]:
    """Positions for words of up to twice this length, by the names of the option."""
    known = {
        "sinusoids": PositionConfig(kind="sinusoidal_per_layer", random_start=5 * length),
        "from_zero": PositionConfig(kind="sinusoidal_per_layer"),
        "shaw": PositionConfig(kind="shaw", clip=2),
        "sharper": PositionConfig(kind="shaw", clip=2, log_scale=max(2, 3 * length // 2)),
    }
    return {name: known[name] for name in names}


def share(lm: LM, task: Task, o: DepthBench) -> float | None:
    return evaluate_task(lm, task.draw(np.random.default_rng(SEED), o.size(TEXTS, 4)), task.counted).exact


def small(dim: int, layers: int, task: Task, heads: int = 4) -> ModelConfig:
    """A model for tasks; positions are added before every layer."""
    return ModelConfig(
        dim=dim, layers=layers, heads=heads, attention=AttentionConfig(kind="full", max_span=4 * task.length),
        position=PositionConfig(kind="sinusoidal_per_layer"), feedforward=FeedForwardConfig(kind="relu", dim=4 * dim),
        embedding=EmbeddingConfig(tied=True),
    )  # fmt: skip


def recipe(bench: Bench[DepthBench], model: ModelConfig, task: Task, steps: int) -> RunConfig:
    o = bench.options
    source = f"{task.name}({', '.join(f'{name}={value}' for name, value in vars(task).items())})"
    settings = TrainConfig(
        batch=o.size(32, 2), block=task.length, steps=steps, eval_every=0, save_every=0, spike=0.0, measure=False,
        eval_tokens=o.size(100, 2) * task.length, threads=o.threads, tensorboard="off", seed=o.seed,
    )  # fmt: skip
    optim = OptimConfig(kind="muon", lr=1e-2, warmup=min(100, steps), weight_decay=0.0)
    return RunConfig(data=DataConfig(source=source), model=model, optim=optim, train=settings)


def folder(bench: Bench[DepthBench], name: str) -> Path:
    return bench.file.path.with_suffix("") / f"{name}-{bench.options.seed}"


def exits(bench: Bench[DepthBench]) -> dict:
    from spanformer.bench.depth_text import measure_exits

    return measure_exits(bench)


def calm(bench: Bench[DepthBench]) -> dict:
    from spanformer.bench.depth_text import measure_calm

    return measure_calm(bench)


def ponder(bench: Bench[DepthBench]) -> dict:
    from spanformer.bench.depth_price import measure_ponder

    return measure_ponder(bench)


def span_depth(bench: Bench[DepthBench]) -> dict:
    from spanformer.bench.depth_price import measure_span_depth

    return measure_span_depth(bench)


def pairs(bench: Bench[DepthBench]) -> dict:
    from spanformer.bench.depth_pairs import measure_pairs

    return measure_pairs(bench)


PARTS: dict[str, Callable[[Bench[DepthBench]], dict]] = {
    "chase": chase, "words": words, "ponder": ponder, "span_depth": span_depth, "exits": exits, "calm": calm,
    "pairs": pairs,
}  # fmt: skip
OPTIONS = DepthBench
