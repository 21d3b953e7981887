"""`spanformer bench rare`: whether heads keep a span that only rare facts need, under a price of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.bench.training import trained
from spanformer.core.fields import as_dict
from spanformer.data.config import DataConfig
from spanformer.data.tasks import Facts, written
from spanformer.data.tasks.needle import FACTS, Needle
from spanformer.kinds.notation import parse_layer
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.folder import write_folder
from spanformer.model.heads import swap_heads, without_head
from spanformer.model.layer import SelfAttention
from spanformer.model.lm import LM
from spanformer.report.rare_picture import draw_rare
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.optim import OptimConfig

DISTANCE, HEADS = 2000, 4
NEAR = Needle(distance=256, nearest=16, keys=FACTS)
"""what the first training asks for: the same keys and words, nearer by"""
RATES = (100, 1000, 10_000, 100_000)
PENALTIES = (0.0, 1e-7, 1e-6, 1e-5)
LANES, SEED = 4, 12


class Heads(NamedTuple):
    """Of the last layer."""

    attention: str
    placed: bool = False
    """whether the head that answers becomes the first one before the second training"""


FLOOR = "1 window(2048) + 3 adaptive_span"
KINDS = {
    "static": Heads("adaptive_span"),
    "dynamic": Heads("dynamic_span"),
    "hybrid": Heads("2 window(64) + 2 adaptive_span"),
    "floor": Heads(FLOOR),
    "placed_floor": Heads(FLOOR, placed=True),
    "retrieval": Heads("1 retrieval(64, 16, 2048, 64) + 3 adaptive_span"),
}
"""From hybrid on they are remedies: heads whose reach has no price, beside learned spans."""


def heads_of(kind: str) -> Heads:
    return KINDS.get(kind) or Heads(kind)


@dataclass(frozen=True)
class RareBench(BenchOptions):
    """Train a model to remember facts, then train it on with rarer ones and a price of spans, and ask again.

        spanformer bench rare --threads 1
        spanformer bench rare --parts map --kinds static --rates 1000 --penalties 1e-6 1e-5 --threads 1

    A stream of words holds facts that are asked for 1,000 to 2,000 tokens later (the data source `facts`). First, the
    model learns to answer questions at the end of short texts (`needle`): only answers count, and spans have no price
    and begin at their limit. Then it is trained on from there by all tokens of the stream, for each rate and penalty;
    penalty 0 is what it forgets without a price. Shown is the share of answers that are still right, in a stream with
    one answer in 100 tokens that is the same for all. Nothing is timed, so --rounds and --budget change nothing.
    Arms that are not trained again stay in the file.
    """

    parts: tuple[str, ...] = ()
    """learn: the first training; map: the second, for all rates and penalties; table: print and draw again. Default:
    learn and map, of which each uses the runs beside the result file."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Heads of the last layer by these names: static, dynamic, hybrid (two short windows), floor (the first head
    sees 2,048 tokens), placed_floor (the same, and the head that answers most after the first training changes places
    with it) and retrieval (one head retrieves); or a kind of your own, such as "window(2048)"."""
    rates: tuple[int, ...] = RATES
    """Tokens for each answer in the second training."""
    penalties: tuple[float, ...] = PENALTIES
    """Prices of a token of span (model.attention.penalty) in the second training."""
    learn_steps: int = 300
    """Steps of the first training (with --quick: 2)."""
    steps: int = 200
    """Steps of the second training (with --quick: 2)."""
    lr: float = 5e-4
    """Learning rate of weights in the second training. With 2e-3 and more, words drive out what was learned."""
    span_lr: float = 1e-2
    """Learning rate of spans in the second training."""
    seed: int = 1
    """Random seed of the weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, dict.fromkeys(["learn", "map", "table"]))
        for kind in self.kinds:
            parse_layer(heads_of(kind).attention, HEADS, "kinds")
        for rate in self.rates:
            Facts(rate, DISTANCE)
        for name in ("learn_steps", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


def run(bench: Bench[RareBench]) -> None:
    o = bench.options
    for kind in o.kinds:
        found: dict[str, Any] = {"arms": {}} | (bench.file.found(kind) or {})
        if not o.parts or "learn" in o.parts:
            found |= learn(bench, kind)
            bench.keep(kind, found)
            bench.say(f"{kind:12} learned: {100 * found['learned']:5.1f} % right, spans {found['spans']}")
        if not o.parts or "map" in o.parts:
            for rate in o.rates:
                for penalty in o.penalties:
                    arm = found["arms"][f"{rate} {penalty:g}"] = go_on(bench, kind, rate, penalty)
                    bench.keep(kind, found)
                    bench.say(f"{kind:12} one answer in {rate:>7,}, penalty {penalty:g}: {100 * arm['right']:5.1f} % "
                              f"right, spans {arm['spans']}")  # fmt: skip
    maps = {kind: found for kind in [*KINDS, *o.kinds] if (found := bench.file.found(kind)) and found["arms"]}
    if maps:
        bench.say(f"picture: {draw_rare(maps, bench.file.path.with_suffix('.png'))}")


def learn(bench: Bench[RareBench], kind: str) -> dict:
    near = replace(NEAR, distance=bench.options.size(NEAR.distance, 64))
    config = recipe(bench, kind, written(near), 0.0)
    config = replace(config, train=replace(config.train, batch=bench.options.size(16, 2), block=near.length))
    lm = trained(bench, config, folder(bench, kind), f"{kind}, near by")
    found: dict[str, Any] = {"attention": heads_of(kind).attention}
    if heads_of(kind).placed:
        found["without"] = place(bench, lm, placed(bench, kind))
    return found | {"learned": share(bench, lm), "spans": longest(lm)}


def place(bench: Bench[RareBench], lm: LM, out: Path) -> list[float]:
    """Let the head of the last layer that answers become its first, and save the model. Returns the share of answers
    that are right without each head."""
    layer, right = lm.blocks[-1].attention, []
    assert isinstance(layer, SelfAttention)
    for head in range(HEADS):
        with without_head(layer, head):
            right.append(share(bench, lm))
    swap_heads(layer, 0, min(range(HEADS), key=right.__getitem__))
    write_folder(out, {"model": lm.state_dict()}, {"model": as_dict(lm.config)}, replace=True)
    return right


def placed(bench: Bench[RareBench], kind: str) -> Path:
    return folder(bench, f"{kind} placed")


def go_on(bench: Bench[RareBench], kind: str, rate: int, penalty: float) -> dict:
    """Train the learned model on with rarer facts and a price of spans."""
    o, start = bench.options, placed(bench, kind) if heads_of(kind).placed else folder(bench, kind)
    if not start.exists():
        raise ValueError(f"{start} does not exist; run `spanformer bench rare --parts learn --kinds {kind}` before map")
    config = recipe(bench, kind, written(Facts(rate, DISTANCE)), penalty)
    rarer = replace(config.train, start=str(start), steps=o.size(o.steps, 2))
    optim = replace(config.optim, warmup=min(20, rarer.steps), lr=o.lr, span_lr=o.span_lr)
    out = folder(bench, f"{kind} {rate} {penalty:g}")
    lm = trained(bench, replace(config, train=rarer, optim=optim), out, f"{kind}, one in {rate:,}, {penalty:g}")
    return {"right": share(bench, lm), "spans": longest(lm)}


def folder(bench: Bench[RareBench], name: str) -> Path:
    return bench.file.path.with_suffix("") / "".join(c if c.isalnum() or c in ".-" else "-" for c in name)


def recipe(bench: Bench[RareBench], kind: str, source: str, penalty: float) -> RunConfig:
    o = bench.options
    model = ModelConfig(
        dim=o.size(128, 32), layers=2, heads=HEADS,
        attention=AttentionConfig(
            stack=("window(2)", heads_of(kind).attention), max_span=2048, ramp=32, init=1.0, penalty=penalty
        ),
        position=PositionConfig(kind="none"), feedforward=FeedForwardConfig(kind="relu", dim=o.size(256, 32)),
        embedding=EmbeddingConfig(tied=True),
    )  # fmt: skip
    steps = o.size(o.learn_steps, 2)
    optim = OptimConfig(kind="muon", lr=5e-3, span_lr=1e-2, warmup=min(50, steps), weight_decay=0.0)
    settings = TrainConfig(
        batch=o.size(8, 2), block=o.size(512, 64), steps=steps, eval_every=0, eval_tokens=o.size(20_000, 200),
        save_every=0, spike=0.0, measure=False, threads=o.threads, tensorboard="off", seed=o.seed,
    )  # fmt: skip
    return RunConfig(data=DataConfig(source=source), model=model, optim=optim, train=settings)


def share(bench: Bench[RareBench], lm: LM) -> float:
    """The share of right answers in a stream that no training reads."""
    stream = Facts(100, DISTANCE).draw(np.random.default_rng(SEED), bench.options.size(100_000, 10_000))
    return answered(lm, stream.tokens, stream.answers, bench.options.size(512, 64))


@torch.no_grad()
def answered(lm: LM, tokens: np.ndarray, answers: np.ndarray, block: int) -> float:
    """The share of answers that are the likeliest token, in a stream read in LANES parts. Answers in the first 2,048
    tokens of a part do not count: their facts may lie before it."""
    length = len(tokens) // LANES
    ids = torch.from_numpy(tokens[: LANES * length].astype(np.int64)).view(LANES, length)
    asked = torch.from_numpy(answers[: LANES * length]).view(LANES, length)
    asked[:, :2048] = False
    right, state = 0, None
    lm.eval()
    for at in range(0, length - 1, block):
        found = lm(ids[:, at : min(at + block, length - 1)], state)
        state, guesses = found.state, found.logits.argmax(-1)
        here = slice(at + 1, at + 1 + guesses.shape[1])
        right += int(((guesses == ids[:, here]) & asked[:, here]).sum())
    return right / max(1, int(asked.sum()))


def longest(lm: LM) -> list[float]:
    """The spans of the last layer; of dynamic ones, their mean over the text that was read last."""
    return [round(float(z), 1) for z in lm.spans()[-1] if z is not None]


OPTIONS = RareBench
