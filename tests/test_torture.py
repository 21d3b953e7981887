"""The fault tests notice faults: a check that finds nothing wrong with a broken file would prove nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spanformer.train.run import train
from support.same_runs import final
from support.tiny_runs import tiny
from torture.checks import PNG_END, differences, half_written, leftovers, other_files
from torture.damage import harm
from torture.phases import STARTING, Page
from torture.processes import Ended
from torture.stage import Stage
from torture.tally import Tally

FAULTS = {
    "an empty picture": ("report/a.png", b"", "no whole picture"),
    "half a page": ("report/report.html", b"<html><body>", "no whole page"),
    "a broken line": ("events.jsonl", b'{"event": "start"}\n{"event": "st\n{"event": "stop"}\n', "broken line"),
    "a checkpoint without files": ("checkpoints/step-00000003/model.safetensors", b"", "has no meta.json"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_half_written_files_are_found(tmp_path: Path, name: str) -> None:
    file, content, said = FAULTS[name]
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(content)
    (wrong,) = half_written(tmp_path)
    assert said in wrong


def test_whole_files_and_those_of_a_writer_at_work_are_no_fault(tmp_path: Path) -> None:
    for name, content in (("a.png", PNG_END), (".a.png.12345678.new/a.png", b""), ("events.jsonl", b"{}\n{")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert half_written(tmp_path) == []
    assert leftovers(tmp_path) == [f"{tmp_path / '.a.png.12345678.new'} is left over"]


def test_another_loss_is_found(tmp_path: Path) -> None:
    short = {"train.steps": 3, "train.eval_every": 0}
    for name, changes in (("a", {}), ("b", {}), ("c", {"optim.lr": 0.02})):
        train(tiny(tmp_path, short | changes | {"out": str(tmp_path / name)}))
    assert final(tmp_path / "a") and differences(tmp_path / "a", tmp_path / "b") == []
    (wrong,) = differences(tmp_path / "c", tmp_path / "a")
    assert "differs from an undisturbed run" in wrong


def test_other_files_are_found(tmp_path: Path) -> None:
    for folder, files in (("a", {"x": "1", "y": "2", "z": "3"}), ("b", {"x": "1", "y": "other", "more": ""})):
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name).write_text(content)
    found = [wrong.removeprefix(str(tmp_path)) for wrong in other_files(tmp_path / "a", tmp_path / "b")]
    assert found == ["/a/more is there once only", "/a/z is there once only", "/a/y has another content"]


@pytest.mark.parametrize(
    ("code", "said", "refused"),
    [
        (2, "spanformer: x is 3; expected 4\n", True),
        (2, "Traceback (most recent call last):\nspanformer: x\n", False),
        (1, "spanformer: x\n", False),
        (0, "spanformer: x\n", False),
        (2, "", False),
    ],
)
def test_refusal_is_one_sentence_and_exit_code_2(code: int, said: str, refused: bool) -> None:
    assert Ended(code, said, STARTING).refused is refused


def test_phase_outlives_the_process_that_noted_it(tmp_path: Path) -> None:
    page = Page(tmp_path / "phase", new=True)
    Page(tmp_path / "phase").enter("training")
    assert page.now() == "training" and page.entered("training") == 1 and page.entered("evaluating") == 0


def test_harm_changes_one_bit_or_cuts(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Tally(0, 1, 1.0), random.Random(0), hf=False)
    (tmp_path / "file").write_bytes(bytes(100))
    assert "flipped" in harm(stage, tmp_path / "file", "flipped")
    found = (tmp_path / "file").read_bytes()
    assert len(found) == 100 and sum(byte.bit_count() for byte in found) == 1
    assert "cut to" in harm(stage, tmp_path / "file", "cut") and len((tmp_path / "file").read_bytes()) < 100


def test_tally_counts_failures_and_tells_the_time_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tally = Tally(7, planned=4, minutes=1.0)
    tally.case("kills", "one", [])
    tally.case("kills", "two", ["half a file"])
    tally.skip("disks", "no root", 2)
    shown = capsys.readouterr().out
    assert "1 of 4 cases" in shown and "a second" in shown and " left" in shown and "FAILED kills: two: half a" in shown
    assert "1 failures; seed 7" in tally.text() and "skipped: disks: no root" in tally.text()
    assert Tally(0, 1, minutes=0.0).late()
