"""The run files of docs/paper.md and docs/images.md: each is valid, and every run takes a step at a reduced size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spanformer.cli import compare, sweep
from spanformer.cli.compare import Comparison, parameters
from spanformer.cli.runfile import read_run
from spanformer.cli.sweep import one_run
from spanformer.cli.train_many import train_many
from spanformer.core.fields import as_dict
from spanformer.model.config import AttentionConfig
from spanformer.report.events import read_run as read_events
from spanformer.train.config import RunConfig
from support.images import fake_digits
from support.tiny_runs import write_text

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(ROOT.glob("runs/paper/*.toml"))
HEADLINE = ROOT / "runs/paper/headline.toml"


def parse(file: Path) -> Comparison:
    """Its runs, as the command that its first lines name trains them."""
    command = next(each for each in ("compare", "sweep", "train") if f"`spanformer {each} " in file.read_text())
    program, words = f"spanformer {command}", [str(file)]
    if command == "compare":
        return compare.parse(program, words)
    if command == "sweep":
        config = sweep.parse(program, words)
        runs = [one_run(config, kind, limit) for limit in config.limits for kind in config.kinds]
        return Comparison(Path(config.out), runs, False, False, 0)
    run = read_run(RunConfig, program, words)
    return Comparison(Path(), [replace(run, out=file.stem, resume=True)], False, False, 0)


def shrink(run: RunConfig, folder: Path) -> RunConfig:
    """The same recipe, small: its own kinds of attention and objective, on a text that is written here."""
    a, whole = run.model.attention, run.objective in ("image", "task")
    source = run.data.source if whole else str(write_text(folder / "text.txt"))
    data = replace(run.data, source=source, valid=0.1, test=0.1, cache=str(folder / "cache"))
    attention: AttentionConfig = a if whole else replace(a, max_span=a.max_span // 8, ramp=min(a.ramp, 4.0))
    model = replace(run.model, dim=8 * run.model.heads, layers=min(2, run.model.layers), attention=attention)
    train = replace(run.train, batch=2, block=run.train.block if whole else 16, steps=1, minutes=0.0, eval_tokens=200,
                    threads=1, device="cpu", tensorboard="off", measure=False)  # fmt: skip
    return replace(run, out=str(folder / Path(run.out).name), data=data, model=model, train=train)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_runs_are_equal_and_may_be_interrupted(file: Path) -> None:
    comparison = parse(file)
    counts = {parameters(run) for run in comparison.runs}
    assert comparison.different or max(counts) <= 1.02 * min(counts)
    assert comparison.different or len({json.dumps(as_dict(run.data)) for run in comparison.runs}) == 1
    for run in comparison.runs:
        assert run.train.threads == 1 and run.resume and run.train.save_every


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_run_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    fake_digits(tmp_path / "packages", monkeypatch)
    runs = [shrink(run, tmp_path) for run in parse(file).runs]
    train_many(runs, tmp_path)
    for run in runs:
        (row,) = read_events(Path(run.out)).steps
        assert row.step == 1 and row.loss > 0
        dynamic = "dynamic_span" in run.model.attention.kind
        assert bool(read_events(Path(run.out)).dynamics) == dynamic  # Figure 5


def test_a_model_of_one_text_continues_on_another(tmp_path: Path) -> None:
    code, prose = (shrink(parse(ROOT / f"runs/paper/transfer-{name}.toml").runs[0], tmp_path)
                   for name in ("code", "wikitext"))  # fmt: skip
    other = replace(prose.data, source=str(write_text(tmp_path / "other.txt", seed=1)))
    on = replace(prose, data=other, train=replace(prose.train, start=code.out))
    train_many([code, on], tmp_path)
    first = read_events(Path(on.out)).evals[0]
    assert first.step == 0 and first.bits != read_events(Path(code.out)).evals[-1].bits
    for name, source in (("code", "stdlib"), ("enwik8", "enwik8"), ("wikitext", "wikitext-2")):
        (run,) = parse(ROOT / f"runs/paper/transfer-{name}.toml").runs
        assert (run.data.source, run.data.tokens) == (source, "byte")


ABOUT = {
    "limits": {"kind", "max_span"}, "moves": {"init", "ramp", "penalty"}, "dynamic": {"kind"}, "transfer-code": set(),
    "transfer-enwik8": set(), "transfer-wikitext": set(),
}  # fmt: skip
"""the settings of attention that a file's runs may differ in from learned spans of the headline"""


@pytest.mark.parametrize("name", ABOUT)
def test_other_files_have_the_model_of_the_headline(name: str) -> None:
    base = next(run for run in parse(HEADLINE).runs if run.model.attention.kind == "adaptive_span")
    for run in parse(ROOT / f"runs/paper/{name}.toml").runs:
        same = {key: getattr(base.model.attention, key) for key in ABOUT[name]}
        assert replace(run.model, attention=replace(run.model.attention, **same)) == base.model, run.out
        span_lr = run.optim.span_lr if name == "moves" else base.optim.span_lr
        assert run.optim == replace(base.optim, span_lr=span_lr)
        assert run.train == replace(base.train, minutes=40.0, steps=1000 if name == "moves" else 2000)


def test_sweep_and_grid_cover_what_they_are_about() -> None:
    limits = parse(ROOT / "runs/paper/limits.toml").runs
    assert [(run.model.attention.max_span, run.model.attention.kind) for run in limits] == [
        (limit, kind) for limit in (256, 512, 1024, 2048, 4096) for kind in ("adaptive_span", "full")
    ]
    moves = [Path(run.out).name for run in parse(ROOT / "runs/paper/moves.toml").runs]
    assert moves[0] == "unchanged" and len(moves) == 12
    assert {name.partition("-")[0] for name in moves[1:]} == {"span_lr", "init", "ramp", "penalty"}
