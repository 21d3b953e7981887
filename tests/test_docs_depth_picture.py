"""docs/depth_picture.py draws the layers of a run's text, at a threshold if it is given one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from spanformer.train.run import train
from support.tiny_runs import tiny

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("depth_picture_script", ROOT / "docs" / "depth_picture.py")
assert _spec is not None and _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def folder(tmp_path: Path, kind: str) -> str:
    train(tiny(tmp_path, {"model.depth.kind": kind, "train.steps": 2}))
    return str(tmp_path / "run")


def test_layers_are_drawn_with_and_without_a_threshold(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    run, picture = folder(tmp_path, "exits"), tmp_path / "exits.png"
    script.main(run, str(picture))
    assert "2.0 of 2 layers on average" in capsys.readouterr().out and picture.stat().st_size > 1000
    script.main(run, str(picture), "softmax:0.0")
    assert "1.0 of 2 layers on average" in capsys.readouterr().out


def test_a_run_of_fixed_depth_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs through all layers; expected a run with"):
        script.main(folder(tmp_path, "fixed"), str(tmp_path / "picture.png"))
