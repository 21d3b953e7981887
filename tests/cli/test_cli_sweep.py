"""`spanformer sweep`: a run for each limit and kind, drawn together; continued, it trains only what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from spanformer.cli.main import main
from spanformer.model.load import load
from spanformer.report.events import read_run
from support.tiny_runs import options

KINDS = ("adaptive_span", "full", "window")


@pytest.mark.slow
def test_every_limit_with_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "sweep"
    arguments = ["sweep", *options(tmp_path, {"out": str(out), "train.steps": 3}), "--limits", "8", "24", "--kinds"]
    main([*arguments, *KINDS[:2]])
    report = out / "report"
    assert f"report: {report / 'report.html'}" in capsys.readouterr().out
    assert {"sweep.png", "compare-cost.png", "compare-bits.png", "report.html"} <= {p.name for p in report.iterdir()}
    main([*arguments, *KINDS, "--resume"])
    assert capsys.readouterr().out.count("already trained") == 4
    for limit in (8, 24):
        for kind in KINDS:
            run = read_run(out / f"{kind}-{limit}")
            assert run.start.config["model"]["attention"]["kind"] == kind and run.steps[-1].step == 3
            most = load(out / f"{kind}-{limit}").distances()
            assert max(map(max, most)) <= limit + 4  # the ramp of a learned span
            if kind != "adaptive_span":
                assert most == [[limit] * 2] * 2


def test_nothing_to_sweep(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["sweep", *options(tmp_path), "--limits"])
    assert end.value.code == 2
    assert "limits or kinds is empty; expected at least one of each" in capsys.readouterr().err


def test_limit_shorter_than_a_block_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A block of the attention; a limit shorter than train.block, 16, is none of that."""
    out = tmp_path / "sweep"
    words = ["sweep", *options(tmp_path, {"out": str(out), "train.steps": 1}), "--limits", "24", "8", "--kinds"]
    with pytest.raises(SystemExit) as end:
        main([*words, "full", "fixed(12, 2)"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error == "spanformer: size is 12 and max_span 8; expected a block within max_span\n"
    assert not out.exists()
    main([*words, "full", "fixed(8, 2)"])
    assert read_run(out / "full-8").steps[-1].step == 1 and (out / "fixed(8, 2)-8").exists()
