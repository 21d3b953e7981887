"""No bfloat16 product is run on a processor without units for it, unless the user asked for bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spanformer.cli.runfile import read_run
from spanformer.core import processor
from spanformer.ops import kernel
from spanformer.train.config import RunConfig
from spanformer.train.run import train
from support.products import Bfloat16Products
from support.tiny_runs import tiny, write_text

DEMO = Path(__file__).resolve().parents[2] / "runs" / "demo.toml"
MUON = {"optim.kind": "muon", "train.steps": 2, "train.eval_every": 0, "train.save_every": 0}


def counted(config: RunConfig) -> dict[str, int]:
    with Bfloat16Products() as mode:
        train(config)
    return {name: count for name, count in mode.counted.items() if count}


@pytest.fixture
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)


@pytest.mark.slow
def test_demo_runs_none_without_units(tmp_path: Path, no_units: None) -> None:
    """Steps, evaluation and the measuring pass; its own model and optimiser, on a smaller batch of another text."""
    demo = read_run(RunConfig, "spanformer train", [str(DEMO)])
    config = replace(
        demo,
        out=str(tmp_path / "run"),
        data=replace(demo.data, source=str(write_text(tmp_path / "text.txt")), cache=str(tmp_path / "cache")),
        train=replace(demo.train, batch=1, block=32, steps=3, eval_tokens=300, threads=1, device="cpu",
                      tensorboard="off"),
    )  # fmt: skip
    assert config.optim.kind == "muon" and config.train.measure
    assert counted(config) == {}


def test_muon_uses_the_units_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: True)
    found = counted(tiny(tmp_path, MUON))
    matrices = 2 * (4 + 3)  # two layers of query, key, value, output and a SwiGLU
    assert found == {"mm": 2 * matrices * 5, "addmm": 2 * matrices * 10}


def test_bfloat16_is_used_when_it_is_asked_for(tmp_path: Path, no_units: None) -> None:
    found = counted(tiny(tmp_path, MUON | {"train.dtype": "bfloat16"}))
    assert found["mm"] > 0 and (found.get("native", 0) > 0 or kernel.problem() is not None)
