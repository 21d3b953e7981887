"""Finding a command by its words, and how commands end: with stand-ins for commands."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import types
from dataclasses import dataclass

import pytest

import spanformer
from spanformer.cli import main as cli
from spanformer.cli.command import Command
from spanformer.cli.main import Route, main


@dataclass(frozen=True)
class Options:
    """A stand-in."""

    size: int = 1
    """How large."""


def run(options: Options) -> None:
    print("size", options.size)


def own_parse(program: str, arguments: list[str]) -> Options:
    print(program, arguments)
    return Options(len(arguments))


def raising(error: BaseException) -> Command:
    def fail(options: Options) -> None:
        raise error

    return Command(Options, fail)


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    module = types.ModuleType("stand_in")
    leaves = {
        "TRAIN": Command(Options, run, own_parse),
        "REPORT": Command(Options, run, own_parse),
        "ATTENTION": Command(Options, run),
        "IMPORT": Command(Options, run),
        "VALUE": raising(ValueError("size is 3;\n  expected 4")),
        "GONE": raising(FileNotFoundError(2, "No such file or directory", "a.bin")),
        "PIPE": raising(OSError("no room")),
        "LIBRARY": raising(ImportError("tokenizers is not installed")),
        "STOP": raising(KeyboardInterrupt()),
        "STOP_SAYING": raising(KeyboardInterrupt("stopped; half of it is in a.json")),
    }
    vars(module).update(leaves)
    monkeypatch.setitem(sys.modules, "stand_in", module)
    words = {"train": "TRAIN", "report": "REPORT", "report attention": "ATTENTION", "bench attention": "ATTENTION"}
    words |= {"import-original": "IMPORT", "bench models": "IMPORT"}
    words |= {name.lower().replace("_", "-"): name for name in list(leaves)[4:]}
    monkeypatch.setattr(cli, "COMMANDS", {key: Route("stand_in", name, f"help {key}") for key, name in words.items()})


def ended(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    "arguments, printed",
    [
        (("train",), "spanformer train []\nsize 0\n"),
        (("train", "runs/demo.toml", "--optim.lr", "0.05"),
         "spanformer train ['runs/demo.toml', '--optim.lr', '0.05']\nsize 3\n"),
        (("report", "runs/a", "runs/b"), "spanformer report ['runs/a', 'runs/b']\nsize 2\n"),
        (("report",), "spanformer report []\nsize 0\n"),
        (("report", "attention", "--size", "5"), "size 5\n"),
        (("report", "attentions"), "spanformer report ['attentions']\nsize 1\n"),
        (("import-original", "--size", "6"), "size 6\n"),
        (("bench", "attention"), "size 1\n"),
    ],
)  # fmt: skip
def test_two_word_command_precedes_one_word(capsys, arguments, printed):
    main(arguments)
    assert capsys.readouterr().out == printed


def test_help_lists_every_command(capsys):
    code, out, _ = ended(capsys, "--help")
    assert code == 0
    for words in cli.COMMANDS:
        assert f"  spanformer {words} " in out and f"help {words}\n" in out


def test_help_of_a_group_lists_its_commands(capsys):
    for arguments in (("bench",), ("bench", "--help")):
        code, out, _ = ended(capsys, *arguments)
        assert code == 0 and "spanformer bench models" in out and "spanformer train" not in out


def test_help_of_a_command_is_its_own(capsys):
    code, out, _ = ended(capsys, "import-original", "--help")
    assert code == 0 and "How large." in out and "usage: spanformer import-original" in out


def test_version(capsys):
    assert ended(capsys, "--version") == (0, f"spanformer {spanformer.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("trian",), 2, "there is no command 'trian'; expected one of train, report, bench, import-original, value, "
                        "gone, pipe, library, stop, stop-saying (see spanformer --help)"),
        (("bench", "model"), 2, "there is no command 'bench model'; expected bench attention or bench models"),
        (("value",), 2, "size is 3; expected 4"),
        (("gone",), 2, "a.bin: No such file or directory"),
        (("pipe",), 2, "no room"),
        (("library",), 2, "tokenizers is not installed"),
        (("stop",), 130, "stopped"),
        (("stop-saying",), 130, "stopped; half of it is in a.json"),
    ],
)  # fmt: skip
def test_error_exits_with_one_sentence(capsys, arguments, code, said):
    assert ended(capsys, *arguments) == (code, "", f"spanformer: {said}\n")


LIGHT = """
import sys
sys.argv = ["spanformer", "--help"]
from spanformer.cli.main import Route, main
try:
    main()
finally:
    print("LOADED", {"torch", "numpy", "tyro", "rich", "matplotlib"} & set(sys.modules))
"""


def test_help_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert "Commands:" in done.stdout and "LOADED set()" in done.stdout, done.stdout + done.stderr


def test_help_is_fast():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "spanformer", "--help"], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0 and "spanformer bench attention" in done.stdout, done.stderr
    print(f"spanformer --help: {statistics.median(seconds):.3f} s, the median of 5; the aim is 0.5")
    assert statistics.median(seconds) <= 1.0  # twice the aim, for a machine that is busy


def test_module_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "spanformer", "fly"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("spanformer: there is no command 'fly'")


@pytest.mark.slow
def test_torchrun_runs_the_module():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, "spanformer", "--version"], capture_output=True, text=True, env=environment)
    assert done.stdout == f"spanformer {spanformer.__version__}\n", done.stderr
