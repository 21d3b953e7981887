"""`spanformer compare runs/compare/enwik8.toml`: train several mechanisms on the same data for the same time, and
report the quality and cost of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.cli.runfile import read_run
from spanformer.cli.train_many import differing, hold_out, train_many
from spanformer.cli.vary import UNCHANGED, file_name, variations
from spanformer.core.fields import as_dict, build
from spanformer.core.files import write_text
from spanformer.core.progress import OnProgress
from spanformer.core.text import printable
from spanformer.model.config import AttentionConfig, PositionConfig
from spanformer.train.config import RunConfig

SHARE = 0.02
"""largest relative difference allowed between the numbers of parameters"""
BUDGET = ("train.steps", "train.minutes", "train.batch", "train.block")


@dataclass(frozen=True)
class CompareConfig(RunConfig):
    """Train several runs on the same data, with equal numbers of parameters and equal time, and report them together.

        spanformer compare runs/compare/enwik8.toml --train.minutes 5
        spanformer compare runs/cpu/enwik8.toml runs/cpu/modern.toml --different

    A comparison file is a run file that also lists `kinds` (as in model.attention.kind), `positions` or `depths`: every
    combination is a run. `vary` lists values of settings, one of which differs in each further run. Several run files
    are compared as they are. Options apply to all runs. Finished runs are not trained again: repeat the command to
    continue after an interruption or to add kinds.
    """

    kinds: tuple[str, ...] = ()
    """kinds of attention to train, such as window(128) or "Window(64) | Global([0])"; with semicolons, the kinds of
    layers: "window(64); full"; none: the run file's kind"""
    positions: tuple[str, ...] = ()
    """position encodings to train each kind with; none: the run file's position encoding"""
    depths: tuple[Literal["fixed", "exits", "universal", "act"], ...] = ()
    """stacks to train each of them with: fixed, all layers for every token; exits; universal, one block for all layers;
    act, one block that each token runs through until it halts; none: the run file's stack"""
    vary: tuple[str, ...] = ()
    """settings and their values, such as "optim.span_lr = 0.01, 0.02" "model.attention.init = 0.5": each of them is run
    once for every value, with all others as in the run file"""
    different: bool = False
    """compare even if data, training time or (by more than 2 %) the numbers of parameters differ"""
    again: bool = False
    """after training, measure the cost of a step of each run again; the machine should be idle by then"""
    test_tokens: int = 0
    """after training, measure bits on this many tokens of the test split with each run's best checkpoint; 0: do not"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_tokens < 0:
            raise ValueError(f"test_tokens is {self.test_tokens}; expected 0 or more")


@dataclass(frozen=True)
class Comparison:
    out: Path
    runs: list[RunConfig]
    different: bool
    again: bool
    test_tokens: int


def parse(program: str, arguments: list[str]) -> Comparison:
    files = []
    while arguments and not arguments[0].startswith("-"):
        file, *arguments = arguments
        files.append(file)
    known = sorted(str(path) for folder in ("", "compare", "paper") for path in Path("runs", folder).glob("*.toml"))
    if not files and not arguments:
        raise ValueError(f"no file is given; expected a comparison file or several run files (see {program} --help)")
    if len(files) <= 1:
        config = read_run(CompareConfig, program, [*files, *arguments], known)
        out = Path(config.out or Path("out") / f"compare-{Path(files[0]).stem if files else 'run'}")
        if not _listed(config):
            raise ValueError(
                f"{files[0] if files else 'the run'} lists neither kinds nor positions nor depths nor values to "
                "vary; expected at least one of them (--kinds full window(128)), or several run files"
            )
        return Comparison(out, _product(config, out), config.different, config.again, config.test_tokens)
    read = [read_run(CompareConfig, program, [file, *arguments], known) for file in files]
    if listed := [file for file, config in zip(files, read, strict=True) if _listed(config)]:
        raise ValueError(f"{listed[0]} lists kinds, positions, depths or values to vary; compare it by itself")
    names = [Path(file).stem for file in files]
    names = [name if names.count(name) == 1 else file_name(str(Path(file).with_suffix("")))
             for name, file in zip(names, files, strict=True)]  # fmt: skip
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(files)} names a run file twice; expected each once")
    out = Path(read[0].out or Path("out") / f"compare-{'-'.join(names)}"[:80])
    runs = [_run(config, out / name, config.model) for config, name in zip(read, names, strict=True)]
    return Comparison(out, runs, read[0].different, read[0].again, read[0].test_tokens)


def run(comparison: Comparison) -> None:
    from spanformer.cli.summary import reporting

    runs = comparison.runs
    with Progress(transient=True) as report:
        report("counting parameters", 0, 0)
        if not comparison.different:
            check_alike(runs)
    train_many(runs, comparison.out)
    again = "the same command, which does not train finished runs again"
    with reporting(comparison.out, again), hold_out(comparison.out), Progress(transient=True) as report:
        if comparison.again:
            _measure(runs, report)
        if comparison.test_tokens:
            _test(runs, comparison.test_tokens, report)
        report("drawing the report", 0, 0)
        for line in write_comparison(runs, comparison.out):
            print(line)


def _measure(runs: list[RunConfig], report: OnProgress) -> None:
    from spanformer.report.events import read_run as read_events
    from spanformer.train.remeasure import measure_again

    for number, each in enumerate(runs, 1):
        found = read_events(Path(each.out))
        measured = found.start.machine.get("device", "cpu") == "cpu"
        print(f"measuring {number} of {len(runs)}: {found.name}" + ("" if measured else ", skipped: trained on a GPU"))
        if measured:
            report(f"measuring the cost of a step of {found.name}", number - 1, len(runs))
            measure_again(each, found.steps[-1].step)


def _test(runs: list[RunConfig], tokens: int, report: OnProgress) -> None:
    from spanformer.report.events import read_run as read_events
    from spanformer.train.remeasure import measure_test

    for number, each in enumerate(runs, 1):
        found = read_events(Path(each.out))
        print(f"testing {number} of {len(runs)}: {found.name}")
        measure_test(each, tokens, found.evals, functools.partial(report, f"reading test with {found.name}"))


def write_comparison(runs: list[RunConfig], out: Path) -> list[str]:
    """Write the report, and its table as Markdown and JSON; returns the lines to print."""
    from spanformer.report.compare_rows import FILE, compare_rows
    from spanformer.report.compare_table import markdown, side_by_side
    from spanformer.report.events import read_run as read_events
    from spanformer.report.page import write_report

    read = [read_events(Path(each.out)) for each in runs]
    names = [printable(Path(each.out).name) for each in runs]
    table = markdown(*side_by_side(read, names))
    write_text(out / "compare.md", table + "\n")
    rows = [as_dict(row) for row in compare_rows(read, names)]
    write_text(out / FILE, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
    page = write_report([Path(each.out) for each in runs], out / "report")
    files = ", ".join(printable(out / name) for name in ("compare.md", FILE))
    return ["", table, "", f"table: {files}", f"report: {printable(page)}"]


def check_alike(runs: list[RunConfig]) -> None:
    """Raise ValueError if the runs differ in data, training time or number of parameters."""
    first = runs[0]
    for each in runs[1:]:
        for key, now, then in differing(as_dict(each), as_dict(first)):
            if key.startswith("data.") or key in BUDGET:
                raise ValueError(
                    f"{Path(each.out).name} has {key} = {now!r} and {Path(first.out).name} {then!r}; expected the same "
                    f"value for all runs (set it with --{key.replace('_', '-')}, or compare anyway with --different)"
                )
    counts = {Path(each.out).name: parameters(each) for each in runs}
    least, most = (by(counts, key=lambda name: counts[name]) for by in (min, max))
    if counts[most] > (1 + SHARE) * counts[least]:
        raise ValueError(
            f"{most} has {counts[most]:,} parameters and {least} {counts[least]:,}; expected a difference of at "
            f"most {SHARE:.0%} (change their sizes, or compare anyway with --different)"
        )


def parameters(config: RunConfig) -> int:
    """Number of parameters of the run's model. A vocabulary that only the data determines counts as 256 tokens."""
    import torch

    from spanformer.model.load import MODELS

    model = dataclasses.replace(config.model, vocab=config.model.vocab or 256)
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in MODELS[model.kind](model).parameters())


def _listed(config: CompareConfig) -> bool:
    return bool(config.kinds or config.positions or config.depths or config.vary)


def _product(config: CompareConfig, out: Path) -> list[RunConfig]:
    runs: dict[str, RunConfig] = {}
    lists = (config.kinds or (None,), config.positions or (None,), config.depths or (None,))
    for kind, place, depth in itertools.product(*lists):
        named = [each for each in (kind, place, depth) if each is not None]
        model = config.model
        if kind is not None:
            model = dataclasses.replace(model, attention=_attention(model.attention, kind))
        if place is not None:
            chosen = build(PositionConfig, as_dict(model.position) | {"kind": place}, "positions")
            model = dataclasses.replace(model, position=chosen)
        if depth is not None:
            decided = dataclasses.replace(model.depth, kind="fixed" if depth == "universal" else depth)
            stack = "universal" if depth in ("universal", "act") else "residual"
            model = dataclasses.replace(model, stack=stack, depth=decided)
        name = "-".join(map(file_name, named))
        if name in runs:
            raise ValueError(f"{' and '.join(named)} is listed twice; expected each once")
        runs[name] = _run(config, out / name, model)
    return _varied(runs, out, config.vary) if config.vary else list(runs.values())


def _varied(runs: dict[str, RunConfig], out: Path, entries: tuple[str, ...]) -> list[RunConfig]:
    """Each run with all its variations, in folders such as full-span_lr-0.02."""
    found = []
    for name, run in runs.items():
        for ending, varied in variations(run, entries).items():
            folder = name if name and ending == UNCHANGED else "-".join(filter(None, (name, ending)))
            found.append(dataclasses.replace(varied, out=str(out / folder)))
    return found


def _attention(attention: AttentionConfig, kind: str) -> AttentionConfig:
    """With one kind for all layers, or with a list of them that repeats: "window(64); full"."""
    if ";" not in kind:
        return dataclasses.replace(attention, kind=kind, stack=())
    return dataclasses.replace(attention, stack=tuple(each.strip() for each in kind.split(";")))


def _run(config: CompareConfig, out: Path, model) -> RunConfig:
    return RunConfig(str(out), resume=True, data=config.data, model=model, optim=config.optim, train=config.train)


COMPARE = Command(CompareConfig, run, parse)
