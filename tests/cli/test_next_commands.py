"""What `spanformer train` prints last: commands as they can be typed in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spanformer.cli import next_commands as module
from spanformer.cli.next_commands import as_typed, next_commands
from spanformer.data.config import DataConfig
from spanformer.model.config import ModelConfig
from spanformer.train.config import RunConfig


def commands(config: RunConfig) -> list[str]:
    return next_commands(Path("out/a run"), config, "spanformer").splitlines()[2:]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("lm", "stdlib", ["""generate 'out/a run' --prompt "def main(\"""", "spans 'out/a run'"]),
        ("lm", "text8", ["""generate 'out/a run' --prompt "the\"""", "spans 'out/a run'"]),
        ("seq2seq", "numbers", ["eval 'out/a run' --split test", "generate 'out/a run' --prompt 31407"]),
        ("seq2seq", "pairs.tsv", ["eval 'out/a run' --split test"]),
        ("lm", "recall(pairs=2)", ["eval 'out/a run' --split test", "spans 'out/a run'"]),
        ("encoder", "stdlib", ["eval 'out/a run' --split test", "spans 'out/a run'"]),
    ],
)
def test_commands_suit_the_kind_of_model(kind: str, source: str, expected: list[str]) -> None:
    config = RunConfig(data=DataConfig(source), model=ModelConfig(kind=kind))  # type: ignore[arg-type]
    assert commands(config) == [f"  spanformer {words}" for words in expected]


@pytest.mark.parametrize(("opener", "shown"), [("/bin/x", "xdg-open {}"), (None, "open {} in a browser")])
def test_report_is_opened_where_something_opens_it(
    opener: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module.shutil, "which", lambda _name: opener)
    page = tmp_path / "report" / "report.html"
    assert "report.html" not in next_commands(tmp_path, RunConfig(), "spanformer")  # none was drawn
    page.parent.mkdir()
    page.touch()
    assert next_commands(tmp_path, RunConfig(), "spanformer").splitlines()[-1] == f"  {shown.format(page)}"


def test_program_is_named_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = tmp_path / "bin" / "spanformer"
    monkeypatch.setattr(module.shutil, "which", lambda _name: str(on_path))
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "spanformer"])
    assert as_typed(str(on_path)) == "spanformer"
    assert as_typed(".venv/bin/spanformer") == ".venv/bin/spanformer"
    assert as_typed("/x/spanformer/__main__.py") == ".venv/bin/python -m spanformer"
    assert as_typed("/x/bin/pytest") == "spanformer"
