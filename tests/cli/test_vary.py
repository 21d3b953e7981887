"""Values of settings that a comparison varies, one at a time: which runs there are, their names, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from spanformer.cli.compare import parse
from spanformer.cli.main import main
from spanformer.cli.vary import variations
from spanformer.core.fields import as_dict
from spanformer.report.events import read_run
from spanformer.train.config import RunConfig
from support.tiny_runs import options, tiny


def settings(run: RunConfig) -> dict[str, object]:
    """Plain values by dotted key."""

    def walk(values: dict, above: str):
        for key, value in values.items():
            yield from walk(value, f"{above}{key}.") if isinstance(value, dict) else [(above + key, value)]

    return dict(walk(as_dict(run), ""))


def changed(run: RunConfig, base: RunConfig) -> dict[str, object]:
    before = settings(base)
    return {key: value for key, value in settings(run).items() if value != before[key]}


def test_one_setting_differs_in_each_run(tmp_path: Path) -> None:
    base = tiny(tmp_path)
    found = variations(base, ["model.attention.penalty = 0, 1e-4, 1e-6", "optim.span_lr=0.5", "model.norm = 'layer'"])
    assert {name: changed(run, base) for name, run in found.items()} == {
        "unchanged": {},
        "penalty-0": {"model.attention.penalty": 0.0},
        "penalty-1e-06": {"model.attention.penalty": 1e-6},  # 1e-4 is the file's own value
        "span_lr-0.5": {"optim.span_lr": 0.5},
        "norm-layer": {"model.norm": "layer"},
    }


def test_names_are_short_and_differ(tmp_path: Path) -> None:
    entries = ["model.attention.dropout = 0.1", "model.feedforward.dropout = 0.1", "train.start = 'out/a/code'",
               "model.attention.stack = ['full', 'window(8)'], ['full']", "train.measure = true"]  # fmt: skip
    assert list(variations(tiny(tmp_path), entries))[1:] == [
        "model.attention.dropout-0.1", "model.feedforward.dropout-0.1", "start-code", "stack-full-window-8",
        "stack-full", "measure-true",
    ]  # fmt: skip


def test_every_kind_is_varied(tmp_path: Path) -> None:
    words = [*options(tmp_path), "--kinds", "full", "window(8)", "--vary", "optim.lr = 0.5, 0.01"]
    runs = parse("spanformer compare", words).runs
    assert [Path(run.out).name for run in runs] == ["full", "full-lr-0.5", "window-8", "window-8-lr-0.5"]
    assert [run.optim.lr for run in runs] == [0.01, 0.5, 0.01, 0.5] and all(run.resume for run in runs)


def test_varied_runs_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("spanformer.report.page.run_pictures", lambda run: [])
    main(["compare", *options(tmp_path, {"train.steps": 2}), "--vary", "model.attention.init = 0, 0.5"])
    assert "| unchanged |" in (shown := capsys.readouterr().out) and "| init-0.5 |" in shown
    found = [read_run(tmp_path / "run" / name) for name in ("unchanged", "init-0", "init-0.5")]
    assert [run.steps[-1].spans.mean().round() for run in found] == [8, 0, 16]  # of 32


@pytest.mark.parametrize(
    "entry, said",
    [
        ("optim.span_lr", "vary is 'optim.span_lr'; expected a setting and its values, written as in a run file"),
        ("optim.span_lr = ", "vary is 'optim.span_lr = '; expected a setting"),
        ("optim.span_lr = low", "vary is 'optim.span_lr = low'; expected a setting"),
        ("optim.lr = 1]\nx = [2", "expected a setting and its values"),
        ("out = 'a'", "vary is \"out = 'a'\"; expected a setting"),
        ("optim.lr = 'low'", "optim.lr in vary is 'low'; expected a number"),
        ("optim.spanlr = 1", "unknown key optim.spanlr in vary; did you mean optim.span_lr?"),
        ("nothing.lr = 1", "unknown key nothing in vary"),
        ("optim.lr.low = 1", "vary names optim.lr.low, and lr is no section; expected a setting of a run file"),
        ("model.attention.ramp = 0", "model.attention.ramp is 0.0; expected a positive, finite number"),
        ("train.start = 'a/x', 'b/x'", "vary has two values of train.start that are called start-x"),
        ("train.steps = 7", "steps-7 has train.steps = 7 and unchanged 12; expected the same value for all runs"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, capsys, entry: str, said: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compare", *options(tmp_path), "--vary", entry])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and said in error
    assert not (tmp_path / "run").exists()
