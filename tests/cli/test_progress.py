"""What work that takes long shows where there is no terminal, and on one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from spanformer.cli import progress as shown_on
from spanformer.cli.progress import Progress, duration


class Shown:
    """A progress whose console writes into memory and whose clock is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False, **options) -> None:
        self.file, self.now = io.StringIO(), 100.0
        console = Console(file=self.file, force_terminal=terminal, width=200, highlight=False, color_system=None)
        monkeypatch.setattr(shown_on, "Console", lambda **_options: console)
        self.progress = Progress(clock=lambda: self.now, interval=8.0, **options)

    def after(self, seconds: float) -> list[str]:
        """The lines until now, when these many more seconds have passed."""
        self.now += seconds
        self.progress.tick()
        return self.file.getvalue().splitlines()


def test_line_names_the_work_and_the_time_left(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("step 0 of 48", 0, 48)
    shown.now += 12.0
    shown.progress("step 3 of 48", 3, 48)
    assert shown.after(0.0) == ["step 3 of 48 · 6 % · 12 s, about 180 s left"]


def test_no_line_before_the_interval_is_over(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("reading", 1, 10)
    assert shown.after(7.9) == []
    assert len(shown.after(0.1)) == 1
    assert len(shown.after(7.9)) == 1


def test_slow_step_yields_lines_without_reports(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("step 1", 0, 4)
    shown.now += 20.0
    shown.progress("step 2", 1, 4)
    assert shown.after(8.0) == ["step 2 · 25 % · 28 s, about 52 s left"]
    assert shown.after(8.0)[-1] == "step 2 · 25 % · 36 s, about 44 s left"
    assert shown.after(60.0)[-1] == "step 2 · 25 % · 96 s"  # longer than the pace let expect


def test_line_without_a_total_has_only_elapsed_time(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("downloading", 12345, 0)
    assert shown.after(9.0) == ["downloading · 9 s"]


def test_new_stage_has_its_own_pace(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("encoding", 0, 100)
    shown.now += 50.0
    shown.progress("encoding", 100, 100)
    shown.progress("measuring", 0, 4)
    shown.now += 10.0
    shown.progress("measuring", 2, 4)
    assert shown.after(0.0) == ["measuring · 50 % · 10 s, about 10 s left"]
    shown.progress("measuring again", 0, 4)  # as large, and begun anew
    assert shown.after(8.0)[-1] == "measuring again · 0 % · 8 s"


def test_work_may_keep_the_time_itself(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress("continued", 0.75, 1.0, seconds=60.0)
    assert shown.after(8.0) == ["continued · 75 % · 68 s, about 12 s left"]


def test_said_line_postpones_the_next(monkeypatch):
    shown = Shown(monkeypatch)
    shown.now += 7.0
    shown.progress.say("note: [bold]as it is[/bold]")
    assert shown.after(7.0) == ["note: [bold]as it is[/bold]"]
    assert shown.after(1.0)[-1] == "starting · 15 s"


def test_terminal_shows_a_bar_with_the_same_times(monkeypatch):
    shown = Shown(monkeypatch, terminal=True)
    with shown.progress as progress:
        progress("reading [x]", 0, 4)
        shown.now += 10.0
        progress("reading [x]", 2, 4)
    text = shown.file.getvalue()
    assert "reading [x]" in text and "50%" in text and "10 s, about 10 s left" in text


def test_hidden_progress_shows_nothing(monkeypatch):
    shown = Shown(monkeypatch, shown=False)
    before = threading.active_count()
    with shown.progress as progress:
        progress("reading", 2, 4)
        assert threading.active_count() == before
    assert shown.file.getvalue() == ""


def test_thread_outlives_a_closed_stream(monkeypatch):
    shown = Shown(monkeypatch)
    shown.progress._interval = 0.001
    shown.file.close()
    shown.now += 1.0
    with shown.progress as progress:
        time.sleep(0.02)
        progress("work goes on", 1, 2)


def test_piped_stderr_gets_lines_from_a_single_slow_step():
    script = """
import time
from spanformer.cli.progress import Progress
with Progress(interval=0.05) as progress:
    progress("one slow step", 0, 1)
    time.sleep(0.4)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert 2 <= len(lines) <= 8 and set(lines) == {"one slow step · 0 % · 0 s"} and done.stdout == ""


def test_bar_in_a_terminal_leaves_piped_output_alone():
    """As in `spanformer score … --jsonl - > rows`."""
    script = """
from spanformer.cli.progress import Progress
with Progress(transient=True) as progress:
    print("a row")
"""
    screen, terminal = os.openpty()
    with open(screen, "rb"), open(terminal, "wb") as shown:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=shown,
                              env=os.environ | {"TERM": "xterm"}, check=True)  # fmt: skip
    assert done.stdout == b"a row\n"


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (12, "12 s"), (299, "299 s"), (300, "5 min"), (7199, "120 min"), (9000, "2.5 h")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
