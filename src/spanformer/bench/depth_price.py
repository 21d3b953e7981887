"""The parts ponder and span_depth of `spanformer bench depth`: the time of fewer steps, spans with exits."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spanformer.bench.depth import DepthBench, folder, trained
from spanformer.bench.session import Bench
from spanformer.cost.depth import token_cost
from spanformer.data import prepare
from spanformer.data.config import DataConfig
from spanformer.depth import ACT, Confidence, Exits
from spanformer.inspect.dynamic_spans import token_spans
from spanformer.model.config import AttentionConfig, DepthConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate
from spanformer.train.optim import OptimConfig
from spanformer.train.run_events import model_shape

STEPS, LANES = 500, 8
PRICE, DEARER = 0.1, (1.0, 10.0)
"""nats per million operations, and what spans alone are also trained with, to save as much as exits do"""
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
CELLS = {
    "neither": ("full", "fixed"),
    "span": ("dynamic_span", "fixed"),
    "depth": ("full", "exits"),
    "both": ("dynamic_span", "exits"),
}


def measure_ponder(bench: Bench[DepthBench]) -> dict:
    """Time of a pass and of a training step by the mean steps of tokens, relative to all steps."""
    o = bench.options
    lm = LM(
        ModelConfig(
            vocab=256, dim=o.size(256, 32), layers=8, heads=4, stack="universal",
            attention=AttentionConfig(kind="full", max_span=o.size(256, 16)), depth=DepthConfig(kind="act"),
        )
    )  # fmt: skip
    x = torch.randint(256, (o.size(8, 2), o.size(256, 16)), generator=torch.Generator().manual_seed(o.seed))
    assert isinstance(lm.depth, ACT)
    act = lm.depth
    torch.nn.init.normal_(act.score.weight, std=0.1, generator=torch.Generator().manual_seed(o.seed))
    biases = {"8 steps": -1e6, "4 steps": bias_for(lm, x, 4.0), "2 steps": bias_for(lm, x, 2.0)}

    def one(name: str, train: bool) -> None:
        act.score.bias.data.fill_(biases[name])
        lm.train(train)
        with torch.set_grad_enabled(train):
            found = lm(x, targets=x)
            if train:
                (found.nll.mean() + found.penalty).backward()  # pyright: ignore[reportOptionalMemberAccess]
                lm.zero_grad(set_to_none=True)

    found: dict = {}
    bench.plan(2)
    for what, train in (("pass", False), ("training step", True)):
        times = bench.compare(what, {name: partial(one, name, train) for name in biases})
        found[what] = {name: times["8 steps"].times_as_fast_as(times[name]) for name in biases}
    found["steps"] = {}
    for name in biases:
        one(name, False)
        found["steps"][name] = act.mean_steps()
    return found


@torch.no_grad()
def bias_for(lm: LM, x: Tensor, steps: float) -> float:
    """The halting bias with which the tokens x take this many steps on average, each its own number."""
    assert isinstance(lm.depth, ACT)
    low, high = -12.0, 12.0
    lm.eval()
    for _ in range(12):
        bias = (low + high) / 2
        lm.depth.score.bias.data.fill_(bias)
        lm(x)
        low, high = (bias, high) if (lm.depth.mean_steps() or 0) > steps else (low, bias)
    return (low + high) / 2


def config(bench: Bench[DepthBench], kind: str, depth: str, price: float) -> RunConfig:
    o = bench.options
    span = o.size(512, 16)
    decided = DepthConfig(kind=depth, classifier="geometric", oracle="likelihood")  # pyright: ignore[reportArgumentType]
    model = ModelConfig(
        dim=o.size(64, 32), layers=6, heads=4,
        attention=AttentionConfig(kind=kind, max_span=span, ramp=o.size(16, 4), init=0.1),
        position=PositionConfig(kind="rotary"), feedforward=FeedForwardConfig(kind="swiglu"), depth=decided,
    )  # fmt: skip
    settings = TrainConfig(
        batch=o.size(8, 2), block=o.size(256, 16), steps=o.taken(STEPS), eval_every=0, save_every=0, measure=False,
        eval_tokens=o.size(32_768, 256), threads=o.threads, tensorboard="off", seed=o.seed, flop_price=price,
    )  # fmt: skip
    data = DataConfig(source=o.source, copy=o.data, limit=o.size(10_000_000, 0))
    optim = OptimConfig(kind="muon", lr=5e-3, warmup=min(100, o.taken(STEPS)), weight_decay=0.0)
    return RunConfig(data=data, model=model, optim=optim, train=settings)


def measure_span_depth(bench: Bench[DepthBench]) -> dict:
    """Bits and operations per token of {full, dynamic span} × {all layers, exits} under one price; spans alone also
    under higher ones."""
    found: dict = {"steps": bench.options.taken(STEPS)}
    for name, (kind, depth) in CELLS.items():
        found[name] = []
        for price in (PRICE, *DEARER) if name == "span" else (PRICE,):
            each = config(bench, kind, depth, price)
            lm = trained(bench, each, folder(bench, f"span-depth-{name}-{price:g}"), f"{name}, price {price:g}")
            ids = prepare(each.data, on_progress=bench.report).splits["valid"].ids
            found[name] += [{"price": price} | at for at in curve(bench, lm, ids)]
    return found | at_equal_bits({name: found[name] for name in CELLS})


def curve(bench: Bench[DepthBench], lm: LM, ids: np.ndarray) -> list[dict]:
    """A point for each threshold of the exits' classifier; one without exits."""
    if not isinstance(lm.depth, Exits):
        return [point(bench, lm, ids)]
    points = []
    for threshold in (*THRESHOLDS, 1.0):
        lm.depth.confidence = Confidence("classifier", threshold)
        points.append({"threshold": threshold} | point(bench, lm, ids))
    return points


def point(bench: Bench[DepthBench], lm: LM, ids: np.ndarray) -> dict:
    o = bench.options
    block = o.size(256, 16)
    if lm.depth is not None:
        lm.depth.count_from_here()
    bits = evaluate(lm, ids[: o.size(32_768, 256)], lanes=LANES, block=block).bits
    layers = lm.config.layers if lm.depth is None else lm.depth.mean_run()
    return {"bits": bits, "layers": layers, **operations(lm, ids[: o.size(2048, 64)], block)}


@torch.no_grad()
def operations(lm: LM, ids: np.ndarray, block: int) -> dict[str, float]:
    """The mean operations of decoding a token after max_span others, and the mean span of a head in the layers that
    tokens run through."""
    shape, lm, spans, depths = model_shape(lm, block, 1), lm.eval(), [], []
    pieces = torch.from_numpy(ids[: len(ids) // block * block].astype(np.int64)).view(-1, block)
    for piece in pieces:
        by_layer = token_spans(lm, piece)
        if not by_layer:
            lm(piece[None])
        spans.append(torch.stack(list(by_layer.values())) if by_layer else torch.empty(0))
        depths += [shape.layers] * block if lm.depth is None else lm.depth.latest[0].tolist()  # pyright: ignore
    fixed = [[n + 1 for n in layer] for layer in lm.context_length()]
    ramp = lm.config.attention.ramp
    learned = torch.cat(spans, 2) + ramp if spans[0].numel() else None  # [layers, heads, tokens]
    total, seen = 0.0, 0.0
    for t, depth in enumerate(depths):
        reach = fixed if learned is None else learned[:, :, t].ceil().long().tolist()
        total += token_cost(shape, reach, 1 << 40, depth, "none" if lm.depth is None else "classifier").total
        seen += float(np.mean(reach[:depth]))
    return {"operations": total / len(depths), "keys": seen / len(depths)}


def at_equal_bits(found: dict[str, list[dict]]) -> dict:
    """Operations where each cell has the bits of the model that adapts neither, or its nearest point, and how many bits
    that is away; and the operations of each point of both by those of spans alone that have its bits or fewer."""
    wanted = found["neither"][0]["bits"]
    each = {name: cheapest(points, wanted) for name, points in found.items()}
    base = each["neither"]["operations"]
    ratio = {name: at["operations"] / base for name, at in each.items()}
    single = min(ratio["span"], ratio["depth"])
    beside = [{"bits": at["bits"], "ratio": at["operations"] / cheapest(found["span"], at["bits"])["operations"]}
              for at in found["both"]]  # fmt: skip
    return {"equal": each, "ratio": ratio, "both_by_better_single": ratio["both"] / single,
            "both_by_product": ratio["both"] / (ratio["span"] * ratio["depth"]), "both_by_span": beside}  # fmt: skip


def cheapest(points: list[dict], wanted: float) -> dict[str, float]:
    """The point of a curve at these bits, between its measured ones; without such a point, the nearest."""
    crossed = []
    ordered = sorted(points, key=lambda p: p["operations"])
    for a, b in itertools.pairwise(ordered):
        if min(a["bits"], b["bits"]) <= wanted <= max(a["bits"], b["bits"]) and a["bits"] != b["bits"]:
            share = (wanted - a["bits"]) / (b["bits"] - a["bits"])
            crossed.append(a["operations"] + share * (b["operations"] - a["operations"]))
    if crossed:
        return {"operations": min(crossed), "bits_away": 0.0}
    better = [p for p in points if p["bits"] <= wanted]
    at = min(better, key=lambda p: p["operations"]) if better else min(points, key=lambda p: p["bits"])
    return {"operations": at["operations"], "bits_away": at["bits"] / wanted - 1}
