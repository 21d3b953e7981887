"""The parts exits and calm of `spanformer bench depth`: an 8-layer language model of bytes, with exits and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import torch

from spanformer.bench.depth import DepthBench, folder, trained
from spanformer.bench.session import Bench
from spanformer.data import Prepared, prepare
from spanformer.data.config import DataConfig
from spanformer.depth import Confidence
from spanformer.depth.calibrate import NEVER, choose
from spanformer.depth.confidence import Measure
from spanformer.infer.exits import GRID, Consistency, choose_threshold, continuations, exits_by, loss
from spanformer.infer.generate import generate_batch
from spanformer.infer.sampling import Sampling
from spanformer.model.config import AttentionConfig, DepthConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM
from spanformer.model.load import load
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate
from spanformer.train.measure import MeasuredStep
from spanformer.train.objective import make_objective
from spanformer.train.optim import OptimConfig

STEPS, LANES = 400, 8
DELTAS = (0.25, 0.1)
MEASURES: tuple[Measure, ...] = ("softmax", "saturation", "classifier")
CONSISTENCIES = get_args(Consistency)


def config(bench: Bench[DepthBench], depth: DepthConfig) -> RunConfig:
    o = bench.options
    model = ModelConfig(
        dim=o.size(o.width, 32), layers=8, heads=4, attention=AttentionConfig(kind="full", max_span=o.size(256, 16)),
        position=PositionConfig(kind="rotary"), feedforward=FeedForwardConfig(kind="swiglu"), depth=depth,
    )  # fmt: skip
    settings = TrainConfig(
        batch=o.size(8, 2), block=o.size(256, 16), steps=o.taken(STEPS), eval_every=0, save_every=100, measure=False,
        eval_tokens=o.size(16_384, 256), threads=o.threads, tensorboard="off", seed=o.seed,
    )  # fmt: skip
    data = DataConfig(source=o.source, copy=o.data, limit=o.size(10_000_000, 0))
    optim = OptimConfig(kind="muon", lr=5e-3, warmup=min(100, o.taken(STEPS)), weight_decay=0.0)
    return RunConfig(data=data, model=model, optim=optim, train=settings)


def base(bench: Bench[DepthBench]) -> RunConfig:
    """The model that calm and pairs measure: aligned exits, and a calm classifier, which gives the layers no
    gradient."""
    return config(bench, DepthConfig(kind="exits", classifier="calm"))


def measure_exits(bench: Bench[DepthBench]) -> dict:
    """Bits with all layers and at each static exit, beside a model without exits."""
    configs = {"single": config(bench, DepthConfig()), "exits": base(bench)}
    models = {name: trained(bench, each, folder(bench, name), name, resume=True) for name, each in configs.items()}
    data = prepare(configs["single"].data, on_progress=bench.report)
    exits = models["exits"].exits()
    found: dict = {"steps": bench.options.taken(STEPS), "single": bits(bench, models["single"], data)}
    found["static"] = {}
    for n in range(1, exits.layers + 1):
        exits.fixed = n
        found["static"][str(n)] = bits(bench, models["exits"], data)
    exits.fixed = None
    found["step_ratio"] = step_ratio(bench, configs, models, data)
    return found


def bits(bench: Bench[DepthBench], lm: LM, data: Prepared, split: str = "valid") -> float:
    """Per byte of the beginning of a split."""
    ids = data.splits[split].ids[: bench.options.size(16_384, 256)]
    return evaluate(lm, ids, lanes=LANES, block=bench.options.size(256, 16)).bits


def step_ratio(
    bench: Bench[DepthBench], configs: dict[str, RunConfig], models: dict[str, LM], data: Prepared
) -> float:  # fmt: skip
    """Time of a training step with exits, relative to one without."""
    steps = {}
    for name, each in configs.items():
        known = replace(each, model=models[name].config)
        steps[name] = MeasuredStep(models[name].train(), make_objective(data, known, slice(None)).draw(), known)
    bench.plan(1)
    times = bench.compare("a step", {name: step.run for name, step in steps.items()})
    return times["single"].times_as_fast_as(times["exits"])


def measure_calm(bench: Bench[DepthBench]) -> dict:
    """Layers and tokens per second of exits calibrated to each consistency with each confidence, timed in turn with all
    layers. And how often a threshold chosen on half of the prompts has a loss above δ on the others."""
    o, lm = bench.options, load_exits(bench, "calm")
    data = prepare(base(bench).data, on_progress=bench.report)
    ids = data.splits["test"].ids
    count, start, more = o.size(200, 60), o.size(64, 4), o.size(48, 2)
    places = [len(ids) * n // count for n in range(count)]
    prompts = [ids[at : at + start] for at in places]
    truths = [ids[at + start : at + start + more] for at in places]
    found: dict = {each: {} for each in CONSISTENCIES}
    confidences = {"full": Confidence("softmax")}
    for measure in MEASURES:
        texts = Texts(lm, prompts, truths)
        for consistency in CONSISTENCIES:
            rows = found[consistency][measure] = {}
            for delta in DELTAS:
                chosen = choose_threshold(
                    texts.write, truths, weights="", measure=measure, consistency=consistency, delta=delta,
                    max_tokens=more, on_progress=bench.report,
                )  # fmt: skip
                row = next((each for each in chosen.tested if each["threshold"] == chosen.threshold), None)
                rows[str(delta)] = {
                    "threshold": chosen.threshold, "layers": row["layers"] if row else lm.config.layers,
                    "loss": row["loss"] if row else 0.0, "resplits": texts.resplits(measure, consistency, delta),
                }  # fmt: skip
                if chosen.threshold is not None:
                    confidences[f"{consistency} {measure} {delta}"] = chosen.confidence()
    bench.plan(1)
    runs = {name: partial(write, lm, prompts[0], each, o.size(200, 2)) for name, each in confidences.items()}
    times = bench.compare("generating", runs)
    for name in times:
        consistency, _, rest = name.partition(" ")
        measure, _, delta = rest.partition(" ")
        if delta:
            found[consistency][measure][delta]["speed"] = times[name].times_as_fast_as(times["full"])
    found["tokens_per_second"] = o.size(200, 2) / times["full"].median
    return found


class Texts:
    """Greedy continuations by confidence, each written once."""

    def __init__(self, lm: LM, prompts: list[np.ndarray], truths: list[np.ndarray]) -> None:
        self.lm, self.prompts, self.truths = lm, prompts, truths
        self.known: dict[Confidence, tuple[list[list[int]], float]] = {}

    def write(self, confidence: Confidence, report: Callable[[int, int], None]) -> tuple[list[list[int]], float]:
        if confidence not in self.known:
            self.known[confidence] = continuations(
                self.lm, self.prompts, len(self.truths[0]), confidence, batch=100, on_progress=report
            )  # fmt: skip
        return self.known[confidence]

    def resplits(self, measure: Measure, consistency: Consistency, delta: float) -> int:
        """In how many of 100 random halves a threshold chosen on one has a mean loss above δ on the other."""
        full = self.known[Confidence(measure)][0]
        losses, wrong = {}, 0
        for confidence, (texts, _) in self.known.items():
            rows = zip(texts, full, self.truths, strict=True)
            losses[confidence.threshold] = [loss(consistency, *each) for each in rows]
        grid = [each for each in GRID if each in losses]
        for seed in range(100):
            order = np.random.default_rng(seed).permutation(len(full))
            one, other = order[: len(order) // 2], order[len(order) // 2 :]
            found = choose(grid, [[losses[each][n] for n in one] for each in grid], delta, 0.05)
            wrong += found != NEVER and float(np.mean([losses[found][n] for n in other])) > delta
        return wrong


def load_exits(bench: Bench[DepthBench], part: str) -> LM:
    """The model of the part exits."""
    out = folder(bench, "exits")
    if not out.exists():
        raise ValueError(f"there is no model in {out}; measure the part exits before {part}")
    return load(out).eval()


@torch.no_grad()
def write(lm: LM, prompt: np.ndarray, confidence: Confidence, tokens: int) -> None:
    """Generate greedily, one row."""
    with exits_by(lm, confidence):
        for _ in generate_batch(lm, [prompt], sampling=Sampling(temperature=0), max_tokens=tokens, seed=0):
            pass
