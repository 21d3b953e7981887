"""`spanformer bench NAME`: measure, print what was found, write the result file.

The benchmark NAME is spanformer/bench/NAME.py; it is imported when it is asked for, since some need transformers.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from spanformer.bench import AttentionBench, bench_attention
from spanformer.bench.attention import RESULT_FILE
from spanformer.bench.session import Bench, BenchOptions
from spanformer.cli.leaf import Leaf
from spanformer.cli.options import parse_options
from spanformer.cli.progress import Progress
from spanformer.cli.report import show_attention


def run_attention(config: AttentionBench) -> None:
    """Benchmark with progress, then show what came out."""
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
    return KeyboardInterrupt(f"stopped; what was measured until now is in {path}, if anything")


def _leaf(name: str) -> Leaf:
    return Leaf(BenchOptions, functools.partial(run, name), functools.partial(parse, name))


ATTENTION = Leaf(AttentionBench, run_attention)
DECODE, FIT_SPANS, GALLERY, HF = _leaf("decode"), _leaf("fit-spans"), _leaf("gallery"), _leaf("hf")
LONGFORMER, PATTERNS, PER_TOKEN = _leaf("longformer"), _leaf("patterns"), _leaf("per-token")
POSITIONS, PRODUCTS, QUALITY, TRAIN_STEP = _leaf("positions"), _leaf("products"), _leaf("quality"), _leaf("train-step")
