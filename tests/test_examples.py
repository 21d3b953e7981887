"""The notebooks of examples/ run: their code cells, one after the other, in one namespace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))


def run_notebook(path: Path) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "__main__"}
    for n, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{path.name}, cell {n}", "exec"), names)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_holds_no_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_own_model_learns_the_task_and_shorter_spans(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_notebook(next(path for path in NOTEBOOKS if path.stem == "own_model"))
    losses, before, after = names["losses"], names["before"], names["after"]
    assert losses[-1] < 0.7 * losses[0]
    assert all(
        0 <= z < was for layer, were in zip(after, before, strict=True) for z, was in zip(layer, were, strict=True)
    )
    assert "layer 1: spans" in capsys.readouterr().out
