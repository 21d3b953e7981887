"""What a run shows, on a terminal and elsewhere: every event, also with numbers that could not be computed."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from spanformer.cli import progress as shown_on
from spanformer.cli.progress import Progress
from spanformer.cli.screen import Screen
from spanformer.core.events import (
    CheckpointEvent,
    CostEvent,
    EvalEvent,
    Event,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    SkipEvent,
    StartEvent,
    StepEvent,
    StepsEvent,
    StopEvent,
)
from spanformer.core.shape import Shape
from spanformer.train.config import RunConfig, TrainConfig

START = StartEvent(
    step=0, run="enwik8", parameters=4_900_000, unit="char", units={"train": 90_000_000}, tokens={"train": 30_000_000},
    config={"data": {"source": "enwik8"}}, machine={"device": "cpu", "threads": 2}, version="1",
    shape=Shape(layers=12, dim=64, heads=8, kv_heads=8, head_dim=8, feedforward=0, persistent=0, vocab=256, block=64,
                batch=1, max_span=8192),
)  # fmt: skip
STEP = StepEvent(
    step=50, seconds=30.0, bits=2.3456, tokens_per_second=12_345.6, spans=np.array([[10.0, np.nan], [300.0, 50.0]]),
    reach=np.ones((2, 2), dtype=int), tokens=1, loss=1.0, penalty=0.0, lr=1.0, grad_norm=1.0, memory=[],
)  # fmt: skip
COST = CostEvent(1300, **{
    f"{name}_seconds": {"learned": seconds, "full": 9.0}
    for name, seconds in {"step": 0.3, "attention": 0.06, "products": 0.15, "optimizer": 0.075}.items()
})  # fmt: skip
LINE = "step 50 · 2.346 bits per character · 12,346 tokens/s · span 120 on average, 300 longest"


def evaluated(step: int, bits: float) -> EvalEvent:
    return EvalEvent(step, 1.0, "valid", loss=1.0, bits=bits, tokens=1)


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

    def show(self, *rows: Event | ProgressEvent | StepsEvent, seconds: float = 0.0) -> str:
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
    steps = StepsEvent(53, 33.0)
    said = Shown(monkeypatch, terminal=False).show(START, STEP, steps, seconds=8.0)
    assert said.endswith(LINE.replace("50", "53", 1) + " · 26 % · 41 s, about 84 s left\n")


def test_time_left_follows_what_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=False, minutes=1.0).show(START, STEP, seconds=8.0)
    assert said.endswith("50 % · 38 s, about 22 s left\n")


def test_evaluation_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ProgressEvent("evaluating", done, 4096) for done in (0, 1024)]
    said = Shown(monkeypatch, terminal=False).show(START, STEP, *rows, seconds=8.0)
    assert said.endswith("evaluating · 25 % · 8 s\n")


def test_on_a_terminal_there_is_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=True).show(START, STEP)
    assert LINE in said and "25%" in said and "left" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_missing_numbers_are_shown(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    rows = [
        replace(STEP, bits=math.nan, tokens_per_second=math.nan, spans=np.full((2, 2), np.nan)),
        evaluated(50, math.nan),
    ]
    said = Shown(monkeypatch, terminal=terminal).show(START, *rows, seconds=8.0)
    assert "step 50 · ? bits per character · ? tokens/s" in said and "span 0" not in said
    assert "step 50: ? bits per character on valid" in said


def test_every_other_event(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Shown(monkeypatch, terminal=False).show(
        ProgressEvent("encoding [train]", 1.0, 2.0),
        ResumeEvent(1200, "out/[x]/checkpoints/step-00001200", "word", 60.0),
        evaluated(1200, 1.5),
        NoteEvent(1200, "spans [bold]stand[/bold] still"),
        SkipEvent(1201, "the loss is nan"),
        CheckpointEvent(1300, "out"),
        COST,
        StopEvent(1300, "all steps done", 61.4),
    )
    assert said.splitlines() == [
        "continued from step 1,200 (out/[x]/checkpoints/step-00001200)",
        "step 1,200: 1.500 bits per word on valid",
        "note: spans [bold]stand[/bold] still",
        "step 1,201 skipped: the loss is nan",
        "a step takes 300 ms, measured separately: attention 20 %, other products 50 %, optimiser 25 %, the rest 5 %",
        "ended: all steps done, 1,300 steps in 61 s of training, 47.2 ms each",
    ]


def test_bar_of_a_continued_run_begins_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, terminal=True)
    shown.show(
        ProgressEvent("encoding train", 10.0, 2000.0),
        ResumeEvent(150, "out", "byte", 60.0),
        StepsEvent(150, 60.0),
    )
    (task,) = shown.screen.progress.bar.tasks
    assert (task.completed, task.total) == (0.75, 1.0)
    assert shown.screen.progress.stage.left(shown.now) == pytest.approx(20.0)


def test_only_the_first_process_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    shown = Shown(monkeypatch, terminal=True)
    assert not shown.screen.first and shown.screen.progress.bar.disable


def test_command_shows_a_run(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end, continued once."""
    import torch

    from spanformer.cli.main import main
    from support.tiny_runs import options

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
