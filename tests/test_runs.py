"""Every run file that is shipped: it can be read, says what the paper's table says, and takes an optimiser step at a
reduced size."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spanformer.cli.runfile import read_run
from spanformer.core import processor
from spanformer.data import parse_task
from spanformer.report.events import read_run as read_events
from spanformer.train.config import RetrieveConfig, RunConfig
from spanformer.train.run import train
from support.products import Bfloat16Products
from support.tiny_runs import write_text

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path for path in ROOT.glob("runs/**/*.toml") if path.parent.name not in ("compare", "paper", "rl", "decision")
)
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
PAPER = (
    "layers dim heads ff persistent span block batch dropout lr warmup steps penalty",
    {
        "enwik8_small": (8, 256, 4, 1024, 0, 1024, 256, 64, 0.0, 0.07, 8_000, 150_000, 2e-6),
        "enwik8": (12, 512, 8, 2048, 0, 8192, 512, 64, 0.3, 0.07, 32_000, 600_000, 5e-7),
        "enwik8_large": (24, 768, 8, 4096, 0, 8192, 512, 64, 0.4, 0.07, 32_000, 150_000, 5e-7),
        "text8": (12, 512, 8, 2048, 0, 8192, 512, 64, 0.3, 0.07, 32_000, 900_000, 5e-7),
        "text8_large": (24, 768, 8, 4096, 0, 8192, 512, 64, 0.4, 0.07, 32_000, 250_000, 5e-7),
        "enwik8_pers_small": (18, 512, 8, 0, 1024, 8192, 512, 64, 0.3, 0.07, 32_000, 450_000, 1e-7),
        "enwik8_pers": (36, 512, 8, 0, 2048, 8192, 512, 64, 0.4, 0.07, 32_000, 200_000, 1e-7),
        "wiki103_pers": (36, 512, 8, 0, 2048, 2048, 256, 64, 0.3, 2.5e-4, 8_000, 800_000, 5e-7),
    },
)
TASKS = ("runs/recall.toml", "runs/duplicate.toml")
SEQ2SEQ = ("runs/seq2seq.toml", "runs/hard.toml")
OTHERS = (*SEQ2SEQ, "runs/masked.toml", "runs/etc.toml", "runs/linformer.toml", "runs/sinkhorn.toml", *TASKS)
"""runs of what reads no stream of text"""
THEN = {
    "enwik8_large": 20_000, "text8_large": 20_000, "enwik8_pers_small": 30_000, "enwik8_pers": 10_000,
    "wiki103_pers": 50_000,
}  # fmt: skip
"""steps at a tenth of the learning rate, after the others"""


def load(name: str, *more: str) -> RunConfig:
    return read_run(RunConfig, "spanformer train", [str(ROOT / name), *more])


def test_run_files_are_found() -> None:
    assert {f"runs/{name}.toml" for name in PAPER[1]} | set(OTHERS) <= set(NAMES) and "runs/cpu/enwik8.toml" in NAMES


@pytest.mark.parametrize("name", PAPER[1])
def test_papers_settings(name: str) -> None:
    c = load(f"runs/{name}.toml")
    m, a, f = c.model, c.model.attention, c.model.feedforward
    ff = 0 if f.kind == "none" else f.dim
    found = (
        m.layers, m.dim, m.heads, ff, m.persistent, a.max_span, c.train.block, c.train.batch, a.dropout, c.optim.lr,
        c.optim.warmup, c.train.steps, a.penalty,
    )  # fmt: skip
    names = PAPER[0].split()
    assert dict(zip(names, found, strict=True)) == dict(zip(names, PAPER[1][name], strict=True))
    assert m.paper_compat and m.order == "post" and m.norm == "layer" and m.position.kind == "table" and m.kv_heads == 0
    assert (a.kind, a.ramp, a.init, a.stack) == ("adaptive_span", 32.0, 0.0, ())
    assert c.optim.schedule == "constant" and c.optim.span_lr == 0.0
    assert f.kind == "none" or (f.kind, f.bias, f.dropout) == ("relu", True, a.dropout)
    if name == "wiki103_pers":
        e = m.embedding
        assert (c.data.source, c.data.tokens, c.optim.kind, c.optim.clip) == ("wikitext-103", "word", "adamw", 1.0)
        assert (e.tied, e.cutoffs, e.divisor, e.dropout) == (True, (20_000, 40_000, 200_000), 4, 0.1)
        assert c.optim.betas == (0.9, 0.999) and c.optim.weight_decay == 0.0
    else:
        assert (c.data.source, c.data.tokens) == (name.split("_")[0], "byte")
        assert (c.optim.kind, c.optim.clip) == ("adagrad", 0.03)


@pytest.mark.parametrize("name", PAPER[1])
def test_command_for_the_steps_that_follow(name: str) -> None:
    found = re.search(r"spanformer train (runs/\S+) (--resume .*)", (ROOT / f"runs/{name}.toml").read_text())
    assert (found is not None) == (name in THEN)
    if found is not None:
        before, after = load(f"runs/{name}.toml"), load(found[1], *found[2].split())
        assert after.resume and after.optim.lr == pytest.approx(before.optim.lr / 10)
        assert after.train.steps == before.train.steps + THEN[name] and after.model == before.model


@pytest.mark.parametrize("name", [name for name in NAMES if "/cpu/" in name])
def test_smaller_run_is_the_same_recipe(name: str) -> None:
    small, large = load(name), load(name.replace("/cpu/", "/"))
    same = [
        "norm",
        "order",
        "position",
        "paper_compat",
        "feedforward.kind",
        "attention.kind",
        "attention.stack",
        "embedding.tied",
    ]
    for key in same:
        values = []
        for value in (small.model, large.model):
            for part in key.split("."):
                value = getattr(value, part)
            values.append(value)
        assert values[0] == values[1], key
    assert (small.optim.kind, small.optim.clip) == (large.optim.kind, large.optim.clip)
    assert small.model.layers < large.model.layers and small.train.steps < large.train.steps


def shrink(config: RunConfig, folder: Path) -> RunConfig:
    """The same recipe for a second of training: everything that is there stays there, but small; its own kind of
    tokens, of another text."""
    m = config.model
    heads = min(m.heads, 4)
    pairs = m.kind == "seq2seq" or parse_task(
        config.data.source
    )  # these keep their own text, which is made in a moment
    block = config.train.block if pairs else 48 if config.train.cpc_mask_ratio else 16
    source = config.data.source if pairs else str(write_text(folder / "text.txt"))
    return RunConfig(
        out=str(folder / "run"),
        data=replace(config.data, source=source, valid=0.1, cache=str(folder / "cache")),
        model=replace(
            m,
            dim=64,
            layers=2,
            heads=heads,
            kv_heads=m.kv_heads and heads * m.kv_heads // m.heads,
            persistent=m.persistent and 7,
            attention=replace(m.attention, max_span=48),
            feedforward=replace(m.feedforward, dim=m.feedforward.dim and 96),
            embedding=replace(m.embedding, cutoffs=(10, 20, 40)[: len(m.embedding.cutoffs)]),
        ),
        optim=config.optim,
        retrieve=replace(config.retrieve, model=config.retrieve.model and str(folder / "frozen")),
        train=replace(
            config.train, batch=4, block=block, steps=1, minutes=0.0, eval_tokens=300, threads=1, device="cpu",
            tensorboard="off", measure=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_step(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains, and on a processor without bfloat16 units it runs no bfloat16 product."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    threads = torch.get_num_threads()
    try:
        config = shrink(load(name), tmp_path)
        if config.model.neighbours:
            model = replace(config.model, neighbours=0)
            train(replace(config, out=config.retrieve.model, model=model, retrieve=RetrieveConfig()))
        with Bfloat16Products() as products:
            result = train(config)
    finally:
        torch.set_num_threads(threads)
    assert not products.counted.total()
    (row,) = read_events(tmp_path / "run").steps
    assert result.steps == 1 and result.bits is not None
    assert math.isfinite(read_events(tmp_path / "run").evals[-1].exact) == (name in OTHERS)
    assert math.isfinite(row.loss) and row.grad_norm > 0 and math.isfinite(row.grad_norm)
