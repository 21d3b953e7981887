"""`spanformer bench NAME`: measure, print the results, write the result file.

The benchmark NAME is spanformer/bench/NAME.py. It is imported only when it runs, since some need transformers.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from spanformer.bench import AttentionBench, bench_attention
from spanformer.bench.attention import RESULT_FILE
from spanformer.bench.session import Bench, BenchOptions
from spanformer.cli.command import Command
from spanformer.cli.options import parse_options
from spanformer.cli.progress import Progress
from spanformer.cli.report import show_attention


def run_attention(config: AttentionBench) -> None:
    """Run the attention benchmark with a progress bar, then print its tables and draw its pictures."""
    path = config.out / RESULT_FILE
    with Progress() as report:
        try:
            bench_attention(config, on_progress=report)
        except KeyboardInterrupt:
            raise _stopped(path) from None
    show_attention(path)


def run(name: str, options: BenchOptions) -> None:
    with Progress() as report:
        report(f"loading bench {name}", 0, 0)
        bench = Bench(name, options, report, functools.partial(print, flush=True))
        try:
            with bench.settings():
                _module(name).run(bench)
        except KeyboardInterrupt:
            raise _stopped(bench.file.path) from None
    if bench.file.parts:
        print(f"results: {bench.file.path}")


def parse(name: str, program: str, arguments: list[str]) -> BenchOptions:
    return parse_options(_module(name).OPTIONS, program, arguments)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"spanformer.bench.{name.replace('-', '_')}")


def _stopped(path: object) -> KeyboardInterrupt:
    return KeyboardInterrupt(f"stopped; the measurements until now, if any, are in {path}")


def _command(name: str) -> Command:
    return Command(BenchOptions, functools.partial(run, name), functools.partial(parse, name))


ATTENTION, CONTENT = Command(AttentionBench, run_attention), _command("content")
CONTEXT = _command("context")
DECISION, DECODE, DEPTH = _command("decision"), _command("decode"), _command("depth")
FIT_SPANS, GALLERY, GPU = _command("fit-spans"), _command("gallery"), _command("gpu")
HF, KNN, LINEAR = _command("hf"), _command("knn"), _command("linear")
LONGFORMER, MEMORIES = _command("longformer"), _command("memories")
PATTERNS, PER_TOKEN = _command("patterns"), _command("per-token")
POSITIONS, PRODUCTS, RL = _command("positions"), _command("products"), _command("rl")
RARE = _command("rare")
QUALITY, RETRIEVAL, REVERSIBLE = _command("quality"), _command("retrieval"), _command("reversible")
RULER = _command("ruler")
SEARCH = _command("search")
TASKS, TRAIN_STEP = _command("tasks"), _command("train-step")
