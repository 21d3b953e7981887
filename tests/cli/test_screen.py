"""What a run shows, on a terminal and elsewhere: every event, also with numbers that could not be computed."""

from __future__ import annotations

import io
import math
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from spanformer.cli import progress as shown_on
from spanformer.cli.progress import Progress
from spanformer.cli.screen import Screen
from spanformer.train.config import RunConfig, TrainConfig

START = {
    "event": "start", "step": 0, "run": "enwik8", "parameters": 4_900_000, "unit": "char",
    "units": {"train": 90_000_000}, "tokens": {"train": 30_000_000},
    "config": {"data": {"source": "enwik8"}}, "shape": {"layers": 12, "heads": 8, "max_span": 8192},
    "machine": {"device": "cpu", "threads": 2},
}  # fmt: skip
STEP = {
    "event": "step", "step": 50, "seconds": 30.0, "bits": 2.3456, "tokens_per_second": 12_345.6,
    "spans": [[10.0, None], [300.0, 50.0]],
}  # fmt: skip
COST = {
    f"{name}_seconds": {"learned": seconds, "full": 9.0}
    for name, seconds in {"step": 0.3, "attention": 0.06, "products": 0.15, "optimizer": 0.075}.items()
}
LINE = "step 50 · 2.346 bits per character · 12,346 tokens/s · span 120 on average, 300 longest"


class Shown:
    """A screen whose console writes into memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool, minutes: float = 0.0) -> None:
        self.file = io.StringIO()
        width = 200 if terminal else 80
        console = Console(file=self.file, force_terminal=terminal, width=width, highlight=False, color_system=None)
        monkeypatch.setattr(shown_on, "Console", lambda **_options: console)
        self.now = 0.0
        monkeypatch.setattr("spanformer.cli.screen.Progress", partial(Progress, clock=lambda: self.now))
        self.screen = Screen(RunConfig(train=TrainConfig(steps=200, minutes=minutes)))

    def show(self, *rows: dict, seconds: float = 0.0) -> str:
        """What these rows show, and what the seconds after them show."""
        with self.screen as screen:
            for row in rows:
                screen.show(row)
            self.now += seconds
            screen.progress.tick()
        return self.file.getvalue()


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=False).show(START, STEP, seconds=8.0)
    assert said.splitlines() == [
        "enwik8: 4.90 M parameters, 12 layers of 8 heads, spans up to 8,192; enwik8, 90,000,000 characters to train "
        "on; cpu, 2 threads",
        f"{LINE} · 25 % · 38 s, about 82 s left",
    ]


def test_steps_between_two_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"event": "steps", "step": 53, "seconds": 33.0}
    said = Shown(monkeypatch, terminal=False).show(START, STEP, steps, seconds=8.0)
    assert said.endswith(LINE.replace("50", "53", 1) + " · 26 % · 41 s, about 84 s left\n")


def test_time_left_follows_what_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=False, minutes=1.0).show(START, STEP, seconds=8.0)
    assert said.endswith("50 % · 38 s, about 22 s left\n")


def test_evaluation_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"event": "progress", "title": "evaluating", "done": done, "total": 4096} for done in (0, 1024)]
    said = Shown(monkeypatch, terminal=False).show(START, STEP, *rows, seconds=8.0)
    assert said.endswith("evaluating · 25 % · 8 s\n")


def test_on_a_terminal_there_is_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=True).show(START, STEP)
    assert LINE in said and "25%" in said and "left" in said


@pytest.mark.parametrize("nothing", [None, math.nan], ids=str)
@pytest.mark.parametrize("terminal", [True, False])
def test_numbers_that_are_not_there(monkeypatch: pytest.MonkeyPatch, nothing: float | None, terminal: bool) -> None:
    rows = [
        STEP | {"bits": nothing, "tokens_per_second": nothing, "spans": []},
        {"event": "eval", "step": 50, "bits": nothing, "split": "valid"},
    ]
    said = Shown(monkeypatch, terminal=terminal).show(START, *rows, seconds=8.0)
    assert "step 50 · ? bits per character · ? tokens/s" in said and "span 0" not in said
    assert "step 50: ? bits per character on valid" in said


def test_every_other_event(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=False).show(
        {"event": "progress", "title": "encoding [train]", "done": 1.0, "total": 2.0},
        {"event": "resume", "step": 1200, "path": "out/[x]/checkpoints/step-00001200", "unit": "word", "seconds": 60.0},
        {"event": "eval", "step": 1200, "bits": 1.5, "split": "valid"},
        {"event": "note", "step": 1200, "text": "spans [bold]stand[/bold] still"},
        {"event": "skip", "step": 1201, "reason": "the loss is nan"},
        {"event": "checkpoint", "step": 1300, "path": "out"},
        {"event": "cost", "step": 1300} | COST,
        {"event": "stop", "step": 1300, "reason": "all steps done", "seconds": 61.4},
    )
    assert said.splitlines() == [
        "continued from step 1,200 (out/[x]/checkpoints/step-00001200)",
        "step 1,200: 1.500 bits per word on valid",
        "note: spans [bold]stand[/bold] still",
        "step 1,201 skipped: the loss is nan",
        "a step takes 300 ms, measured by itself: attention 20 %, other products 50 %, optimiser 25 %, the rest 5 %",
        "ended: all steps done, 1,300 steps in 61 s of training, 47.2 ms each",
    ]


def test_the_bar_of_a_continued_run_begins_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, terminal=True)
    shown.show(
        {"event": "progress", "title": "encoding train", "done": 10.0, "total": 2000.0},
        {"event": "resume", "step": 150, "path": "out", "unit": "byte", "seconds": 60.0},
        {"event": "steps", "step": 150, "seconds": 60.0},
    )
    (task,) = shown.screen.progress.bar.tasks
    assert (task.completed, task.total) == (0.75, 1.0)
    assert shown.screen.progress.stage.left(shown.now) == pytest.approx(20.0)


def test_only_the_first_process_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    shown = Shown(monkeypatch, terminal=True)
    assert not shown.screen.first and shown.screen.progress.bar.disable


def test_the_command_shows_a_run(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end, continued once."""
    import torch

    from spanformer.cli.main import main
    from tiny_runs import options

    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # which would hold for the tests that follow
    main(["train", *options(tmp_path, {"train.steps": 3, "data.tokens": "char"})])
    first = capsys.readouterr()
    main(["train", *options(tmp_path, {"data.tokens": "char"}), "--resume"])
    second = capsys.readouterr()
    assert "run: 0.0" in first.err and "step 3: " in first.err and "ended: all steps done, 3 steps" in first.err
    assert "continued from step 3 (" in second.err and " bits per character on valid" in second.err
    for said in (first.out, second.out):
        assert "Validation went from " in said and "layer 1" in said
        assert f"report: {tmp_path / 'run' / 'report' / 'report.html'}" in said
    assert (tmp_path / "run" / "report" / "report.html").exists()
