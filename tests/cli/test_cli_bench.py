"""The command line: teaches, runs, and refuses with one sentence."""

import json

import pytest

from spanformer.cli.main import main


def ended(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("bench",), ("bench", "-h")])
def test_help_names_commands(capsys, arguments):
    code, out, _ = ended(capsys, *arguments)
    assert code == 0 and "spanformer bench attention" in out


def test_every_option_is_explained(capsys):
    code, out, _ = ended(capsys, "bench", "attention", "--help")
    assert code == 0
    for expected in (
        "--profiles",
        "--quick",
        "one head sees all",
        "--original",
        "clone of",
        "--budget",
        "third",
        "WRONG",
    ):
        assert expected in out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("fly",), "there is no command 'fly'"),
        (("bench", "models"), "there is no command 'bench models'"),
        (("bench", "attention", "--nope"), "there is no option --nope (see spanformer bench attention --help)"),
        (("bench", "attention", "--profile", "A"), "there is no option --profile; did you mean --profiles?"),
        (("bench", "attention", "--batch", "0"), "batch is 0; expected at least 1"),
        (("bench", "attention", "--batch", "many"), "--batch is 'many'; expected a whole number"),
        (("bench", "attention", "--lengths", "64", "x"), "--lengths is '64 x'; expected whole numbers"),
        (("bench", "attention", "--profiles", "Q"), "profile is 'Q'; expected A, B, S, M, F or a number"),
        (("bench", "attention", "--dtype", "int8"), "--dtype is 'int8'; expected one of float32,"),
        (("bench", "attention", "--contenders", "nobody"), "contender is 'nobody'"),
        (("bench", "attention", "--original", "/nowhere" * 20), f"original is {'/nowhere' * 20}; expected"),
        (("bench", "attention", "--lengths", "1"), "lengths holds 1"),
        (("report", "attention"), "PATH is missing; expected a path"),
        (("report", "attention", "/nowhere.json"), "/nowhere.json does not exist"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_2(capsys, arguments, said):
    code, out, err = ended(capsys, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("spanformer: ") and err.count("\n") == 1 and said in err
    assert "Traceback" not in err and "│" not in err


def test_parts_and_modes_that_leave_nothing_are_refused(capsys, tmp_path):
    words = ["--parts", "decode", "--modes", "forward", "--out", str(tmp_path)]
    code, out, err = ended(capsys, "bench", "attention", *words)
    assert code == 2 and out == "" and "no step of parts decode has modes forward" in err


def test_folder_that_cannot_be_made_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("spanformer.bench.attention.time_step", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "taken").touch()
    code, _, err = ended(
        capsys, "bench", "attention", "--quick", "--parts", "overhead", "--out", str(tmp_path / "taken")
    )
    assert code == 2 and "taken" in err and "Traceback" not in err


def test_interrupted_run_says_where_its_results_are(capsys, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("spanformer.cli.bench.bench_attention", stop)
    code, _, err = ended(capsys, "bench", "attention", "--quick", "--out", str(tmp_path))
    assert code == 130 and err.endswith(
        f"spanformer: stopped; the measurements until now, if any, are in {tmp_path}/attention.json\n"
    )


def test_tiny_run_leaves_results_and_pictures(capsys, tmp_path):
    main(
        ["bench", "attention", "--quick", "--profiles", "A", "--lengths", "64", "--heads", "2", "--dim", "8",
         "--threads", "1", "--parts", "cost", "--contenders", "reference", "--out", str(tmp_path)]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "SDPA, full causal" in shown and "spanformer reference" in shown and str(tmp_path) in shown
    assert json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert (tmp_path / "cost-forward-backward.png").stat().st_size > 5000
    assert (tmp_path / "speedup-forward-backward.svg").exists()
    main(["report", "attention", str(tmp_path / "attention.json")])
