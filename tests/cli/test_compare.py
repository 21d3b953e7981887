"""`spanformer compare`: what is trained, what is not trained again, what is refused, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spanformer.cli.compare import COMPARE, check_alike, parameters, parse
from spanformer.cli.main import main
from spanformer.cli.train_many import train_many
from spanformer.core.fields import as_dict, build
from spanformer.core.peak import unsupported
from spanformer.data import prepare
from spanformer.model.load import load, load_meta
from spanformer.report.compare_table import HEADER
from spanformer.report.events import read_run
from spanformer.report.spans_text import summary
from spanformer.train.config import RunConfig
from spanformer.train.evaluate import evaluate
from spanformer.train.loop import TrainingLoop
from spanformer.train.run_folder import hold_folder
from support.tiny_runs import _words, options, values, write_text

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"train.steps": 4, "train.eval_every": 2, "train.save_every": 2, "train.log_every": 1, "train.eval_tokens": 200}


@pytest.fixture(autouse=True)
def pictures_of_each_run_are_tested_elsewhere(monkeypatch):
    monkeypatch.setattr("spanformer.report.page.run_pictures", lambda run: [])


def toml(table: dict, above: str = "") -> str:
    """A run's values as a file, the plain ones of a section before those in it."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    parts = ["\n".join(plain)]
    for key, value in table.items():
        if isinstance(value, dict):
            parts += [f"[{above}{key}]", toml(value, f"{above}{key}.")]
    return "\n".join(parts)


def run_file(folder: Path, name: str, changes: dict | None = None, more: str = "") -> str:
    found = values(folder, SHORT | (changes or {}))
    found.pop("out")
    path = folder / f"{name}.toml"
    path.write_text(more + toml(found), encoding="utf-8")
    return str(path)


def refused(capsys, *arguments, code: int = 2) -> str:
    with pytest.raises(SystemExit) as end:
        main(["compare", *map(str, arguments)])
    error = capsys.readouterr().err
    assert end.value.code == code and error.count("\n") == 1
    return error


def test_kinds_are_trained_once_and_reported_together(tmp_path, capsys):
    file = run_file(tmp_path, "both", {"train.measure": True}, 'kinds = ["window(8)", "full"]\n')
    out = tmp_path / "out"
    main(["compare", file, "--out", str(out)])
    shown = capsys.readouterr().out
    assert "1 of 2: window-8\n" in shown and "2 of 2: full\n" in shown and "| run | bits per byte |" in shown
    runs = [read_run(out / name) for name in ("window-8", "full")]
    assert [run.start.config["model"]["attention"]["kind"] for run in runs] == ["window(8)", "full"]
    assert runs[0].start.parameters == runs[1].start.parameters
    for name in ("report.html", "compare-cost.png", "compare-bits.png"):
        assert (out / "report" / name).stat().st_size > 1000
    found = json.loads((out / "compare.json").read_text())
    assert [row["run"] for row in found] == ["window-8", "full"]
    assert all(row["bits"] > 0 and row["steps"] == 4 and row["flops_per_token"] > 0 for row in found)
    assert found[0]["flops_per_token"] < found[1]["flops_per_token"]

    written = {name: (out / name / "events.jsonl").read_bytes() for name in ("window-8", "full")}
    main(["compare", file, "--out", str(out), "--kinds", "window(8)", "full", "window(4)"])
    shown = capsys.readouterr().out
    assert shown.count("already trained") == 2 and "3 of 3: window-4\n" in shown
    assert all((out / name / "events.jsonl").read_bytes() == text for name, text in written.items())
    assert (out / "compare.md").read_text().count("\n") == 5

    main(["compare", file, "--out", str(out), "--again"])
    assert "measuring 2 of 2: full" in capsys.readouterr().out
    for run, name in zip(runs, ("window-8", "full"), strict=True):
        again = read_run(out / name)
        assert (out / name / "events.jsonl").read_text().count('"event": "cost"') == 2 and again.stop is not None
        (old,), (new,) = run.costs, again.costs  # the later one takes the place of the other
        assert old.flops == new.flops and old.step_seconds != new.step_seconds

    said = refused(capsys, file, "--out", out, "--optim.lr", "0.5")
    assert "window-8 holds a run with optim.lr = 0.01, and this run 0.5" in said


@pytest.mark.slow
def test_encoders_are_compared_by_all_they_cost(tmp_path, capsys):
    changes = {"train.measure": True, "model.kind": "encoder", "train.block": 256, "model.attention.max_span": 256}
    file = run_file(tmp_path, "masked", changes, 'kinds = ["window(8)", "full"]\n')
    main(["compare", file, "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    header = next(line for line in shown.splitlines() if line.startswith("| run")).strip("| ").split(" | ")
    unknown = {"layers", "test bits"} | (set() if unsupported() is None else {"peak memory"})
    header = [name for name in header if not name.startswith("bits at ")]  # times may differ
    assert header == ["run", "bits per masked byte", *(name for name in HEADER[2:] if name not in unknown)]
    full, window = sorted(json.loads((tmp_path / "out" / "compare.json").read_text()), key=lambda row: row["run"])
    assert window["flops_per_token"] < full["flops_per_token"] and "FLOPs" in {*full["best_by"], *window["best_by"]}
    assert full["seconds_per_step"] > 0 and window["seconds_per_step"] > 0
    assert (tmp_path / "out" / "report" / "compare-cost.png").stat().st_size > 1000


def test_positions_multiply_and_names_tell_them_apart(tmp_path):
    file = run_file(tmp_path, "all", more='kinds = ["full", "window(8)"]\npositions = ["alibi", "rotary"]\n')
    comparison = parse("spanformer compare", [file, "--out", str(tmp_path / "x")])
    assert [Path(run.out).name for run in comparison.runs] == [
        "full-alibi", "full-rotary", "window-8-alibi", "window-8-rotary"
    ]  # fmt: skip
    assert comparison.runs[2].model.position.kind == "alibi" and all(run.resume for run in comparison.runs)


def test_run_files_are_compared_as_they_are(tmp_path, capsys):
    a, b = run_file(tmp_path, "a"), run_file(tmp_path, "b", {"model.attention.kind": "full"})
    main(["compare", a, b, "--out", str(tmp_path / "out"), "--train.steps", "2"])
    assert [read_run(tmp_path / "out" / name).stop.step for name in ("a", "b")] == [2, 2]
    capsys.readouterr()


def test_depths_are_trained_and_their_layers_reported(tmp_path, capsys):
    more = 'depths = ["fixed", "exits", "universal", "act"]\ndifferent = true\n'
    file = run_file(tmp_path, "deep", {"train.steps": 2, "model.layers": 3, "model.depth.bias": 20.0}, more)
    out = tmp_path / "out"
    main(["compare", file, "--out", str(out)])
    shown = capsys.readouterr().out
    runs = {name: read_run(out / name) for name in ("fixed", "exits", "universal", "act")}
    assert {name: run.start.config["model"]["stack"] for name, run in runs.items()} == {
        "fixed": "residual", "exits": "residual", "universal": "universal", "act": "universal"
    }  # fmt: skip
    found = {row["run"]: row for row in json.loads((out / "compare.json").read_text())}
    assert [found[name]["layers"] for name in runs] == [None, 3.0, None, 1.0]  # a bias of 20 halts at once
    assert found["universal"]["parameters"] < found["fixed"]["parameters"] and "| layers |" in shown
    assert runs["act"].evals[-1].depth == runs["act"].steps[-1].depth == 1.0
    assert "A token takes 1.00 of 3 layers on average." in summary(runs["act"])
    assert "A token takes" not in summary(runs["fixed"])
    assert "layers of a token" in (out / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model.feedforward.dim": 64}, "parameters and a"),
        ({"train.steps": 5}, "b has train.steps = 5 and a 4; expected the same value for all runs"),
        ({"data.valid": 0.2}, "b has data.valid = 0.2 and a 0.1; expected the same value for all runs"),
    ],
)
def test_invalid_comparison_is_refused_before_training(tmp_path, capsys, changes, said):
    a, b = run_file(tmp_path, "a"), run_file(tmp_path, "b", changes)
    error = refused(capsys, a, b, "--out", tmp_path / "out")
    assert said in error and "--different" in error and not (tmp_path / "out").exists()
    assert parse("spanformer compare", [a, b, "--different"]).different


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: [], "no file is given; expected a comparison file or several run files"),
        (lambda folder: [run_file(folder, "a")], "a.toml lists neither kinds nor positions nor depths"),
        (lambda folder: [run_file(folder, "a"), run_file(folder, "k", more='kinds = ["full"]\n')],
         "k.toml lists kinds, positions, depths or values to vary; compare it by itself"),
        (lambda folder: [run_file(folder, "a"), "--kinds", "full", "full"], "full is listed twice"),
        (lambda folder: [run_file(folder, "a")] * 2, "names a run file twice"),
        (lambda folder: [run_file(folder, "a"), "--kinds", "fool"], "fool"),
        (lambda folder: [run_file(folder, "a"), "--positions", "fool"], "positions"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(tmp_path, capsys, make, said):
    assert said in refused(capsys, *make(tmp_path))


def test_interrupted_run_is_continued(tmp_path, capsys):
    write_text(tmp_path / "text.txt")
    out = tmp_path / "out" / "full"
    words = [word for word in options(tmp_path, SHORT) if word]
    words[words.index("--out") + 1] = str(out)
    main(["train", *words, "--train.steps", "2", "--model.attention.kind", "full"])
    file = run_file(tmp_path, "c", more='kinds = ["full"]\n')
    events = out / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if '"stop"' not in line]
    events.write_text("\n".join(kept) + "\n")  # as if it had been killed
    capsys.readouterr()
    main(["compare", file, "--out", str(tmp_path / "out")])
    found = read_run(out)
    assert found.resumes[0].step == 2 and found.stop is not None and found.stop.step == 4


@pytest.mark.parametrize("file", sorted(ROOT.glob("runs/compare/*.toml")), ids=lambda path: path.stem)
def test_shipped_comparisons_are_valid_and_equal_in_size(file):
    comparison = parse("spanformer compare", [str(file)])
    counts = {parameters(run) for run in comparison.runs}
    assert len(comparison.runs) > 1 and (comparison.different or max(counts) <= 1.02 * min(counts))
    assert len({json.dumps(as_dict(run.data)) for run in comparison.runs}) == 1


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "A comparison file is a run file that also lists" in shown and "--kinds" in shown and COMPARE.parse is parse


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(ROOT.glob("runs/compare/*.toml")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_shipped_comparisons_train(tmp_path, file):
    """Every kind takes two steps at a reduced size."""
    small = values(tmp_path, SHORT | {"train.steps": 2, "train.batch": 2, "model.heads": 4, "model.dim": 32})
    for section, keep in (("model", ("dim", "layers")), ("optim", ("warmup",))):
        small[section] = {key: small[section][key] for key in keep}
    small["model"]["attention"] = {"max_span": 64}
    small["out"] = str(tmp_path / "out")
    comparison = parse("spanformer compare", [str(file), *_words(small, "")])
    if not comparison.different:
        check_alike(comparison.runs)
    train_many(comparison.runs, tmp_path / "out")
    found = [read_run(Path(run.out)) for run in comparison.runs]
    assert len(found) == len(comparison.runs) and all(
        run.steps[-1].step == 2 and run.steps[-1].loss > 0 for run in found
    )


def test_kinds_with_semicolons_are_kinds_of_layers(tmp_path):
    file = run_file(tmp_path, "layers", more='kinds = ["full", "window(8); full"]\n')
    one, two = parse("spanformer compare", [file]).runs
    assert (one.model.attention.kind, one.model.attention.stack) == ("full", ())
    assert two.model.attention.stack == ("window(8)", "full") and Path(two.out).name == "window-8-full"


def test_runs_that_stop_after_minutes_are_finished_and_compared_at_equal_ones(tmp_path, capsys, monkeypatch):
    """Settings are equal, with steps and minutes; full attention is slow, and stops first."""
    step = TrainingLoop._one_step

    def slow(loop) -> str:
        loop.progress.seconds += 30.0 if loop.config.model.attention.kind == "full" else 1.0
        return step(loop)

    monkeypatch.setattr(TrainingLoop, "_one_step", slow)
    more = 'kinds = ["window(8)", "full"]\n'
    file, out = run_file(tmp_path, "both", {"train.steps": 6, "train.minutes": 1.0}, more), tmp_path / "out"
    main(["compare", file, "--out", str(out)])
    assert "| bits per byte | bits at 128 tokens | bits at " in capsys.readouterr().out
    stops = [read_run(out / name).stop for name in ("window-8", "full")]
    assert [(stop.step, stop.reason) for stop in stops] == [(6, "all steps done"), (2, "1 minutes have passed")]
    window, full = json.loads((out / "compare.json").read_text())
    assert window["equal_tokens"] == full["equal_tokens"] == full["tokens"] == 2 * 4 * 16
    assert full["bits_at_equal_tokens"] == full["bits"] and window["bits_at_equal_seconds"] == window["bits"]
    (at_step_2,) = (row.bits for row in read_run(out / "window-8").evals if row.step == 2)
    assert window["bits_at_equal_tokens"] == at_step_2 != window["bits"]
    main(["compare", file, "--out", str(out)])
    assert capsys.readouterr().out.count("already trained") == 2


def test_two_processes_train_kinds_of_one_comparison(tmp_path, capsys, monkeypatch):
    """The second begins and ends while the first trains; a run that another process trains is refused."""
    file, out = run_file(tmp_path, "both", {"train.steps": 2}), tmp_path / "out"
    whole = train_many

    def meanwhile(runs, folder) -> None:
        monkeypatch.setattr("spanformer.cli.compare.train_many", whole)
        main(["compare", file, "--out", str(out), "--kinds", "full"])
        capsys.readouterr()
        with hold_folder(out / "window-8"):
            said = refused(capsys, file, "--out", out, "--kinds", "window(8)")
        assert f"{out / 'window-8'} is in use by process" in said
        whole(runs, folder)

    monkeypatch.setattr("spanformer.cli.compare.train_many", meanwhile)
    main(["compare", file, "--out", str(out), "--kinds", "window(8)", "full"])
    assert "2 of 2: full, already trained" in capsys.readouterr().out
    assert [row["run"] for row in json.loads((out / "compare.json").read_text())] == ["window-8", "full"]


def test_bits_of_the_test_split_are_measured_once(tmp_path, capsys):
    file = run_file(tmp_path, "both", more='kinds = ["window(8)", "full"]\n')
    out = tmp_path / "out"
    main(["compare", file, "--out", str(out), "--test-tokens", "300"])
    said = capsys.readouterr().out
    assert "testing 2 of 2: full" in said and "| test bits |" in said
    for row, name in zip(json.loads((out / "compare.json").read_text()), ("window-8", "full"), strict=True):
        (test,) = (found for found in read_run(out / name).evals if found.split == "test")
        assert (row["test_bits"], row["test_tokens"], test.tokens) == (test.bits, 300, 300)
        lm, data = load(out / name), prepare(read_config(out / name).data)
        assert test.bits == pytest.approx(evaluate(lm, data.splits["test"].ids[:300], lanes=2, block=16).bits)
        assert test.step == load_meta(out / name)["step"]
    written = (out / "full" / "events.jsonl").read_bytes()
    main(["compare", file, "--out", str(out), "--test-tokens", "300"])
    assert (out / "full" / "events.jsonl").read_bytes() == written
    main(["compare", file, "--out", str(out), "--test-tokens", "1000000"])  # all of them
    assert {row["test_tokens"] for row in json.loads((out / "compare.json").read_text())} == {
        read_run(out / "full").start.tokens["test"]
    }
    assert "test_tokens is -1; expected 0 or more" in refused(capsys, file, "--test-tokens", "-1")
    (tmp_path / "text.txt").write_text("another text " * 500)
    assert "was trained beside another test split than" in refused(
        capsys, file, "--out", out, "--test-tokens", "100", code=1
    )


def read_config(out: Path) -> RunConfig:
    return build(RunConfig, read_run(out).start.config, str(out))
