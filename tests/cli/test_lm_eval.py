"""`spanformer lm-eval`: its help, what it takes and what it refuses, without the harness."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spanformer.cli.lm_eval import parse
from spanformer.cli.main import main

PROGRAM = "spanformer lm-eval"
TASKS = ("--tasks", "sums")

HELP = """
import sys
from spanformer.cli.main import main
try:
    main(["lm-eval", "out/demo", "--tasks", "sums", "--help"])
finally:
    print("LOADED", {"torch", "transformers", "lm_eval"} & set(sys.modules))
"""


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["lm-eval", *arguments])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    (line,) = said.err.splitlines()
    return line.removeprefix("spanformer: ")


def test_help_says_how_to_call_it_and_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED set()", done.stdout + done.stderr
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "usage: spanformer lm-eval [-h] MODEL --OPTION VALUE …" in shown
    for part in ("spanformer lm-eval out/demo --tasks lambada_openai", "--include_path", "--bits {0,8,4}"):
        assert part in shown


def test_other_options_go_to_the_harness() -> None:
    words = ["--tasks", "a", "b", "--gen_kwargs", "until=['x']", "--limit=3", "-o", "out/results"]
    for place in (0, 3, 5, 6, 8):  # an option of ours may stand among theirs
        given = parse(PROGRAM, ["out/demo", *words[:place], "--bits", "8", *words[place:]])
        assert (given.model, given.bits, given.harness) == ("out/demo", 8, tuple(words))
    assert parse(PROGRAM, ["out/demo", "--bits=4", *TASKS]).bits == 4
    assert parse(PROGRAM, ["out/demo", "-t", "a"]).harness == ("-t", "a") and parse(PROGRAM, ["m", "-t", "a"]).bits == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "MODEL is missing; expected it before all options (see spanformer lm-eval --help)"),
        (TASKS, "MODEL is missing; expected it before all options (see spanformer lm-eval --help)"),
        (("out/demo", "--limit", "3"), "--tasks is missing; expected names of tasks, such as --tasks lambada_openai "
                                       "(see spanformer lm-eval --help)"),
        (("m", *TASKS, "--bits", "5"), "--bits is '5'; expected one of 0, 8, 4 (see spanformer lm-eval --help)"),
        (("m", *TASKS, "--bits"), "--bits has no value; expected one of 0, 8, 4 (see spanformer lm-eval --help)"),
        (("./none", *TASKS), "./none does not exist; expected the folder of a run or a model, a .gguf file, or a name "
                             "on the hub"),
        (("none.gguf", *TASKS), "none.gguf does not exist; expected the folder of a run or a model, a .gguf file, or "
                                "a name on the hub"),
        (("out/a/b", *TASKS), "out/a/b does not exist; expected the folder of a run or a model, a .gguf file, or a "
                              "name on the hub"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence(capsys, arguments: tuple[str, ...], said: str) -> None:
    assert refused(capsys, *arguments) == said


def test_missing_package_is_one_sentence(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert refused(capsys, str(tmp_path), *TASKS) == (
        "spanformer lm-eval runs EleutherAI's evaluation harness, which is not installed: "
        'pip install "spanformer[eval]"'
    )
