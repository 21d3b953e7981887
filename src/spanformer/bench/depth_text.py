"""The parts exits and calm of `spanformer bench depth`: an 8-layer language model of bytes, with exits and without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from spanformer.bench.depth import DepthBench, folder, trained
from spanformer.bench.session import Bench
from spanformer.data import Prepared, prepare
from spanformer.data.config import DataConfig
from spanformer.depth import Confidence, Exits
from spanformer.infer.exits import calibrate, exits_by
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


def config(bench: Bench[DepthBench], depth: DepthConfig) -> RunConfig:
    o = bench.options
    model = ModelConfig(
        dim=o.size(128, 32), layers=8, heads=4, attention=AttentionConfig(kind="full", max_span=o.size(256, 16)),
        position=PositionConfig(kind="rotary"), feedforward=FeedForwardConfig(kind="swiglu"), depth=depth,
    )  # fmt: skip
    settings = TrainConfig(
        batch=o.size(8, 2), block=o.size(256, 16), steps=o.taken(STEPS), eval_every=0, save_every=0, measure=False,
        eval_tokens=o.size(16_384, 256), threads=o.threads, tensorboard="off", seed=o.seed,
    )  # fmt: skip
    data = DataConfig(source=o.source, copy=o.data, limit=o.size(10_000_000, 0))
    optim = OptimConfig(kind="muon", lr=5e-3, warmup=min(100, o.taken(STEPS)), weight_decay=0.0)
    return RunConfig(data=data, model=model, optim=optim, train=settings)


def measure_exits(bench: Bench[DepthBench]) -> dict:
    """Bits with all layers, at each static exit and by the classifier, beside a model without exits."""
    depth = DepthConfig(kind="exits", classifier="geometric", oracle="likelihood", price=0.1)
    configs = {"single": config(bench, DepthConfig()), "exits": config(bench, depth)}
    models = {name: trained(bench, each, folder(bench, name), name) for name, each in configs.items()}
    data = prepare(configs["single"].data, on_progress=bench.report)
    lm = models["exits"]
    exits = lm.exits()
    found: dict = {"steps": bench.options.taken(STEPS), "single": bits(bench, models["single"], data)}
    found["static"] = {}
    for n in range(1, exits.layers + 1):
        exits.fixed = n
        found["static"][str(n)] = bits(bench, lm, data)
    exits.fixed = None
    exits.count_from_here()
    learned = bits(bench, lm, data)
    found["classifier"] = {"bits": learned, "layers": exits.mean_run()}
    found["step_ratio"] = step_ratio(bench, configs, models, data)
    return found


def bits(bench: Bench[DepthBench], lm: LM, data: Prepared) -> float:
    """Per byte of the beginning of the validation split."""
    ids = data.splits["valid"].ids[: bench.options.size(16_384, 256)]
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
    """Layers and tokens per second of calibrated exits; the full model is timed in turn."""
    o, out = bench.options, folder(bench, "exits")
    if not out.exists():
        raise ValueError(f"there is no model in {out}; measure the part exits before calm")
    lm = load(out).eval()
    assert isinstance(lm.depth, Exits)
    data = prepare(config(bench, DepthConfig()).data, on_progress=bench.report)
    ids = data.splits["test"].ids
    count, start, more = o.size(100, 60), o.size(64, 4), o.size(48, 2)
    places = [len(ids) * n // count for n in range(count)]
    prompts = [ids[at : at + start] for at in places]
    truths = [ids[at + start : at + start + more] for at in places]
    found: dict = {}
    for delta in DELTAS:
        chosen = calibrate(
            lm, prompts, truths, weights="", measure="softmax", delta=delta, max_tokens=more,
            on_progress=bench.report,
        )  # fmt: skip
        row = next((each for each in chosen.tested if each["threshold"] == chosen.threshold), None)
        found[str(delta)] = {"threshold": chosen.threshold, "layers": row["layers"] if row else lm.depth.layers,
                             "loss": row["loss"] if row else 0.0, "tested": chosen.tested}  # fmt: skip
    confidences = {"full": Confidence("softmax")} | {
        d: Confidence("softmax", r["threshold"]) for d, r in found.items() if r["threshold"]
    }
    bench.plan(1)
    times = bench.compare(
        "generating",
        {name: lambda c=each: write(lm, prompts[0], c, o.size(200, 2)) for name, each in confidences.items()},
    )
    for delta in found:
        found[delta]["speed"] = times[delta].times_as_fast_as(times["full"]) if delta in times else 1.0
    found["tokens_per_second"] = o.size(200, 2) / times["full"].median
    return found


@torch.no_grad()
def write(lm: LM, prompt: np.ndarray, confidence: Confidence, tokens: int) -> None:
    """Generate greedily, one row."""
    with exits_by(lm, confidence):
        for _ in generate_batch(lm, [prompt], sampling=Sampling(temperature=0), max_tokens=tokens, seed=0):
            pass
