"""`spanformer report` and the report after training: where it goes, what runs are called in it, and when it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spanformer.cli.main import main
from spanformer.core.lock import LOCK_FILE
from spanformer.report import drawing, page
from spanformer.report.events import read_run, read_runs
from support import synthetic_runs as synthetic
from support.tiny_runs import options

SMALL = {"layers": 2, "heads": 2, "steps": 6}
EVIL = "a\x1b]0;owned\x07\x9b[2J\u202eb"


@pytest.fixture(autouse=True)
def coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "DPI", 30)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "run_pictures", lambda run: [])
    monkeypatch.setattr(page, "compare_pictures", lambda runs, names: [])


def run(folder: Path, name: str) -> str:
    return str(synthetic.write(folder, synthetic.events(name=name, **SMALL)))


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("no_pictures")
def test_report_of_two_runs_has_a_place_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = run(tmp_path / "a", "first try"), run(tmp_path / "b", "second")
    main(["report", a])
    before = content(tmp_path / "a")
    assert Path(a, "report", "report.html") in before
    main(["report", a, b])
    assert content(tmp_path / "a") == before
    assert "report: out/report-first-try-second/report.html\n" in capsys.readouterr().out
    assert Path("out/report-first-try-second/report.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_runs_of_one_name_are_called_by_their_paths(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run(tmp_path / place, "demo") for place in ("x/demo", "y/demo", "z/other")]
    folders.append(run(tmp_path / "else", "other"))  # a name like another's folder
    main(["report", *folders])
    said = capsys.readouterr().out
    lines = [line.partition(":")[0] for line in said.splitlines()]
    assert lines == ["x/demo", "y/demo", "z/other", "other", "report"]
    found = Path(said.splitlines()[-1].removeprefix("report: ")).read_text()
    assert all(f">{name}</h2>" in found for name in lines[:4]) and "demo (2)" not in found
    assert len({each.name for each in read_runs([Path(folder) for folder in folders])}) == 4


def test_run_that_is_named_twice_is_refused(tmp_path: Path, capsys) -> None:
    a = run(tmp_path / "a", "demo")
    with pytest.raises(SystemExit) as end:
        main(["report", a, f"{a}/events.jsonl"])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"spanformer: {a}/events.jsonl is named twice; expected each run once\n"


def test_kill_while_a_picture_is_written_leaves_the_old_one(tmp_path: Path, monkeypatch) -> None:
    folder = Path(run(tmp_path / "a", "demo"))
    main(["report", str(folder)])
    before = content(folder / "report")
    assert len(before) > 4
    real = drawing.subplots

    def interrupted(*arguments, **keywords):
        figure, axes = real(*arguments, **keywords)

        def savefig(path: Path, **_options: object) -> None:
            Path(path).write_bytes(b"")
            os._exit(9)  # as SIGKILL does, nothing is tidied up

        figure.savefig = savefig
        return figure, axes

    monkeypatch.setattr("spanformer.report.run_pictures.subplots", interrupted)
    if (child := os.fork()) == 0:
        main(["report", str(folder)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert {
        path: bytes for path, bytes in content(folder / "report").items() if not path.parent.name.startswith(".")
    } == before


REPORTS = {
    "deleted events": ("train", "events.jsonl does not exist"),
    "a picture that fails": ("train", "OverflowError"),
    "a sweep": ("sweep", "OverflowError"),
    "a comparison": ("compare", "OverflowError"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report_that_fails_after_training_keeps_the_run(tmp_path: Path, monkeypatch, capsys, name: str) -> None:
    command, reason = REPORTS[name]
    out = tmp_path / "my run"

    def fail(*_arguments: object) -> list:
        raise OverflowError

    def forget(path: Path):
        (path / "events.jsonl").unlink()
        return read_run(path)

    if name == "deleted events":
        monkeypatch.setattr("spanformer.cli.summary.read_run", forget)
    monkeypatch.setattr(page, "run_pictures", fail)
    more = {"sweep": ["--limits", "8", "--kinds", "full"], "compare": ["--kinds", "full"]}.get(command, [])
    with pytest.raises(SystemExit) as end:
        main([command, *options(tmp_path, {"train.steps": 1, "out": str(out)}), *more])
    said = capsys.readouterr()
    again = {
        "train": f"spanformer report '{out}'",
        "sweep": f"spanformer report '{out / 'full-8'}' --out '{out / 'report'}'",
        "compare": "the same command, which does not train finished runs again",
    }[command]
    last = said.err.splitlines()[-1]
    assert end.value.code == 1 and "Traceback" not in said.err
    assert last.startswith(f"spanformer: training is complete and saved in {out}, but its report failed (")
    assert reason in last and last.endswith(f"make the report again with {again}")
    assert list(out.rglob("model.safetensors")) and not list(out.rglob(LOCK_FILE))


@pytest.mark.usefixtures("no_pictures")
def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path: Path, capsys) -> None:
    out = tmp_path / EVIL
    main(["train", *options(tmp_path, {"train.steps": 1, "out": str(out)})])
    main(["report", str(out)])
    main(["report", str(out), run(tmp_path / "b", EVIL), "--out", str(tmp_path / EVIL / "both")])
    sweep = {"train.steps": 1, "out": f"{out}2"}
    main(["sweep", *options(tmp_path, sweep), "--limits", "8", "--kinds", "full"])
    again = ["train", *options(tmp_path, {"out": str(out)})]
    for wrong in (again, ["report", EVIL], ["generate", EVIL, "--prompt", "a"], ["train", f"{EVIL}.toml"], [EVIL],
                  ["data", EVIL], ["spans", EVIL], ["show", EVIL]):  # fmt: skip
        with pytest.raises(SystemExit):
            main(wrong)
    said = "".join(capsys.readouterr())
    assert "a\\x1b]0;owned" in said
    assert all(char.isprintable() or char == "\n" for char in said)
    html = (out / "report" / "report.html").read_text()
    title = html.partition("<title>")[2].partition("</title>")[0]
    assert title.isprintable() and "a\\x1b]0;owned" in title
