"""`spanformer bench tasks`: how well each mechanism recalls, copies, duplicates and finds, against the distance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from spanformer.attention import LSH
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.bench.training import trained
from spanformer.data.config import DataConfig
from spanformer.data.tasks import DistanceTask, Task, parse_task
from spanformer.kinds import KINDS
from spanformer.kinds.notation import parse_layer
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM
from spanformer.report.compare_table import markdown
from spanformer.report.events import read_run
from spanformer.report.task_picture import draw_tasks
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate_task
from spanformer.train.optim import OptimConfig

STATES = ("full", "adaptive_span", *(kind.timed for kind in KINDS.values() if kind.cost.recurrent is not None))
CONTENT = ("full", "window(64)", "lsh(16, 8, 4)", "routing(64, 8)", "indexed(64)")
DIM, HEADS, LONGEST = 128, 4, 1024
SEED = 10  # of texts to evaluate with; those of the splits have lower ones
FIRST = "window(2)"
"""the first layer of tasks with pairs: a token and the one before it, so that a value knows its key"""


class Part(NamedTuple):
    task: str
    """to train with"""
    quick: str
    kinds: tuple[str, ...]
    """of the last layer"""
    points: tuple[int, ...]
    """distances to evaluate at; for duplicate, numbers of rounds"""
    steps: int
    first: tuple[str, ...] = (FIRST,)
    """kinds of the layers before the last"""
    position: str = "none"
    optim: Literal["muon", "adamw"] = "muon"
    lr: float = 5e-3


PARTS = {
    "recall": Part(
        "recall(pairs=8, nearest=16, distance=128)", "recall(pairs=2, nearest=4, distance=16)", STATES,
        (16, 32, 64, 128, 256, 512), 300,
    ),
    "copy": Part(
        "copy(symbols=12, nearest=16, distance=128)", "copy(symbols=2, nearest=3, distance=16)", STATES,
        (16, 32, 64, 128, 256, 512), 300,
    ),
    "duplicate": Part(
        "duplicate(symbols=127)", "duplicate(symbols=7)", ("lsh(64, 4, 4)",), (1, 2, 4, 8), 600, first=(),
        position="learned", optim="adamw", lr=3e-3,
    ),
    "needle": Part(
        "needle(facts=4, nearest=16, distance=256)", "needle(facts=1, nearest=4, distance=16)", CONTENT,
        (16, 32, 64, 128, 256), 300,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TasksBench(BenchOptions):
    """Train a tiny model for each task and mechanism, and measure the share of right answers against the distance.

        spanformer bench tasks --parts recall copy --threads 1
        spanformer bench tasks --parts needle --kinds "window(64)" "lsh(16, 8, 4)"

    One model for each mechanism: 4 heads, d 128, no positions. Its last layer has that mechanism; in the layer before
    it, a token sees itself and the one before. It is trained on texts of all distances up to 128 (needle: 256) and
    evaluated at each, and at longer ones. duplicate has one layer and learned positions. Nothing is timed or repeated,
    so --rounds and --budget change nothing. Results of kinds that are not trained again stay in the file.
    """

    parts: tuple[str, ...] = ()
    """recall: pairs of keys and values, asked for later; copy: a word, copied later; duplicate: Reformer's 0w0w, hashed
    in more and fewer rounds than in training; needle: facts in a long text; table: print and draw the results again.
    Default: all but table."""
    kinds: tuple[str, ...] = ()
    """Attention of the last layer; a mixture or a pattern as well. Default: what the part compares."""
    steps: int = 0
    """Training steps. Default: what the part needs (with --quick: 2)."""
    seed: int = 1
    """Random seed of the weights and of the order of the texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, dict.fromkeys([*PARTS, "table"]))
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}; expected 0 or more")
        for kind in self.kinds:
            parse_layer(kind, HEADS, "kinds")


def run(bench: Bench[TasksBench]) -> None:
    o = bench.options
    for name in o.parts or PARTS:
        if name == "table":
            continue
        part, found = PARTS[name], dict(bench.file.found(name) or {})
        for kind in o.kinds or part.kinds:
            found[kind] = measure(bench, name, part, kind)
            bench.keep(name, found)
            shares = "   ".join(f"{at}: {100 * share:5.1f} %" for at, share in found[kind]["right"].items())
            bench.say(f"{name:9} {kind:24} {shares}")
    show(bench)


def show(bench: Bench[TasksBench]) -> None:
    """Print the tables of all parts in the file, and draw what has distances."""
    found = {name: rows for name in PARTS if (rows := bench.file.found(name))}
    for name, rows in found.items():
        bench.say(f"\n{name}, % of the answers right\n\n{table(rows)}")
    drawn = {name: rows for name, rows in found.items() if name != "duplicate"}
    if drawn:
        bench.say(f"\npicture: {draw_tasks(drawn, bench.file.path.with_suffix('.png'))}")


def table(rows: dict[str, dict]) -> str:
    points = list(dict.fromkeys(at for row in rows.values() for at in row["right"]))
    lines = [[f"`{kind}`", *(_percent(row["right"].get(at)) for at in points)] for kind, row in rows.items()]
    return markdown(["", *points], lines)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def measure(bench: Bench[TasksBench], name: str, part: Part, kind: str) -> dict:
    """Train a model, and evaluate it at every point."""
    source = part.quick if bench.options.quick else part.task
    task = parse_task(source)
    assert task is not None
    out = bench.file.path.with_suffix("") / f"{name}-{''.join(c if c.isalnum() else '-' for c in kind)}"
    config = recipe(bench.options, part, task, source, kind)
    lm = trained(bench, config, out, f"{name} with {kind}")
    rows = read_run(out)
    last = rows.steps[-1]
    spans = [round(float(z), 1) for z in np.ravel(last.spans) if np.isfinite(z)]  # NaN: heads without spans
    right = {str(at): share(lm, task, at) for at in part.points}
    return {"task": source, "right": right, "steps": last.step, "parameters": rows.start.parameters, "spans": spans}


def recipe(o: TasksBench, part: Part, task: Task, source: str, kind: str) -> RunConfig:
    model = ModelConfig(
        dim=DIM, layers=1 + len(part.first), heads=HEADS,
        attention=AttentionConfig(stack=(*part.first, kind), max_span=LONGEST, ramp=32),
        position=PositionConfig(kind=part.position, length=task.length if part.position == "learned" else 0),
        feedforward=FeedForwardConfig(kind="relu", dim=2 * DIM), embedding=EmbeddingConfig(tied=True),
    )  # fmt: skip
    steps = o.steps or o.size(part.steps, 2)
    optim = OptimConfig(kind=part.optim, lr=part.lr, span_lr=1e-2, warmup=50, weight_decay=0.0)
    settings = TrainConfig(
        batch=o.size(16, 2), block=task.length, steps=steps, eval_every=o.size(100, 0), save_every=0, spike=0.0,
        eval_tokens=o.size(100, 2) * task.length, measure=False, threads=o.threads, tensorboard="off", seed=o.seed,
    )  # fmt: skip
    return RunConfig(data=DataConfig(source=source), model=model, optim=optim, train=settings)


def share(lm: LM, task: Task, at: int) -> float:
    """The share of right answers at this distance, or hashed in this many rounds."""
    if isinstance(task, DistanceTask):
        task = replace(task, distance=at, nearest=0)
    else:
        for mechanism in (m for m in lm.modules() if isinstance(m, LSH)):
            mechanism.set_rounds(at)
    texts = task.draw(np.random.default_rng(SEED), 200)
    found = evaluate_task(lm, texts, task.counted).exact
    assert found is not None
    return found


OPTIONS = TasksBench
