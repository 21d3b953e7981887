"""The run files of docs/results: each comparison is valid, and every arm takes a step at a reduced size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spanformer.cli.compare import parameters, parse
from spanformer.cli.train_many import train_many
from spanformer.core.fields import as_dict
from spanformer.model.config import AttentionConfig
from spanformer.report.events import read_run
from spanformer.train.config import RunConfig
from support.images import fake_digits
from support.tiny_runs import write_text

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(ROOT.glob("runs/paper/*.toml"))


def shrink(run: RunConfig, folder: Path) -> RunConfig:
    """The same recipe, small: its own kinds of attention and objective, on a text that is written here."""
    a, whole = run.model.attention, run.objective in ("image", "task")
    source = run.data.source if whole else str(write_text(folder / "text.txt"))
    data = replace(run.data, source=source, valid=0.1, test=0.1, cache=str(folder / "cache"))
    attention: AttentionConfig = a if whole else replace(a, max_span=64, ramp=min(a.ramp, 4.0))
    model = replace(run.model, dim=8 * run.model.heads, layers=min(2, run.model.layers), attention=attention)
    train = replace(run.train, batch=2, block=run.train.block if whole else 16, steps=1, minutes=0.0, eval_tokens=200,
                    threads=1, device="cpu", tensorboard="off", measure=False)  # fmt: skip
    return replace(run, out=str(folder / Path(run.out).name), data=data, model=model, train=train)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_comparison_is_valid_and_may_be_interrupted(file: Path) -> None:
    comparison = parse("spanformer compare", [str(file)])
    counts = {parameters(run) for run in comparison.runs}
    assert comparison.different or max(counts) <= 1.02 * min(counts)
    assert comparison.different or len({json.dumps(as_dict(run.data)) for run in comparison.runs}) == 1
    for run in comparison.runs:
        assert run.train.threads == 1 and run.resume and run.train.save_every


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_arm_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    fake_digits(tmp_path / "packages", monkeypatch)
    runs = [shrink(run, tmp_path) for run in parse("spanformer compare", [str(file)]).runs]
    train_many(runs, tmp_path)
    for run in runs:
        (row,) = read_run(Path(run.out)).steps
        assert row.step == 1 and row.loss > 0
