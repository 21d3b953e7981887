"""The command line: finds a command by its one or two words, reads its options, and runs it.

A command module is imported only when its command is asked for, so `spanformer --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import spanformer
from spanformer.cli.leaf import HELP, Incomplete, Leaf
from spanformer.core.text import printable


@dataclass(frozen=True)
class Command:
    module: str
    """holds a Leaf, under the name below"""
    name: str
    help: str


COMMANDS = {
    "train": Command("spanformer.cli.train", "TRAIN", "train a model from a run file"),
    "eval": Command("spanformer.cli.eval", "EVAL", "bits per character or perplexity of a text"),
    "generate": Command("spanformer.cli.generate", "GENERATE", "what a model writes after a prompt"),
    "score": Command("spanformer.cli.score", "SCORE", "bits per character of any file, token by token"),
    "spans": Command("spanformer.cli.spans", "SPANS", "what every head has learned, as a table and bars"),
    "heatmap": Command("spanformer.cli.heatmap", "HEATMAP", "where every head looks while a model reads a sentence"),
    "report": Command("spanformer.cli.report", "RUNS", "one page of pictures of one run or several"),
    "show": Command("spanformer.cli.show", "SHOW", "what a pattern of attention sees, as a picture, and what it costs"),
    "cost": Command("spanformer.cli.cost", "COST", "what attention costs by arithmetic, mechanism by mechanism"),
    "compare": Command("spanformer.cli.compare", "COMPARE", "train several mechanisms alike and report them together"),
    "sweep": Command("spanformer.cli.sweep", "SWEEP", "train at several span limits and compare"),
    "data": Command("spanformer.cli.data", "DATA", "prepare a corpus and say what is in it"),
    "import-original": Command("spanformer.cli.original", "IMPORT", "a checkpoint of the paper's code as our model"),
    "fit-spans": Command("spanformer.cli.fit_spans", "FIT", "learn the spans of a pretrained model to a memory budget"),
    "probe": Command("spanformer.cli.probe", "PROBE", "what a model still finds far back in a text"),
    "export-windows": Command("spanformer.cli.export_windows", "EXPORT", "learned spans as windows by layer"),
    "bench attention": Command("spanformer.cli.bench", "ATTENTION", "time attention against everything comparable"),
    "bench decode": Command(
        "spanformer.cli.bench", "DECODE", "time decoding, prefill and streaming with per-head caches"
    ),
    "bench fit-spans": Command(
        "spanformer.cli.bench", "FIT_SPANS", "key/value memory against loss of a pretrained model"
    ),
    "bench gallery": Command(
        "spanformer.cli.bench", "GALLERY", "time every mechanism and position; write docs/gallery.md"
    ),
    "bench hf": Command("spanformer.cli.bench", "HF", "time a Hugging Face model with spans beside itself"),
    "bench longformer": Command("spanformer.cli.bench", "LONGFORMER", "time Longformer's pattern beside a dense mask"),
    "bench patterns": Command("spanformer.cli.bench", "PATTERNS", "time fixed patterns beside a dense mask"),
    "bench per-token": Command("spanformer.cli.bench", "PER_TOKEN", "time per token as the sequence grows"),
    "bench positions": Command("spanformer.cli.bench", "POSITIONS", "time position encodings over none"),
    "bench products": Command("spanformer.cli.bench", "PRODUCTS", "time matrix products, MKL beside oneDNN"),
    "bench quality": Command("spanformer.cli.bench", "QUALITY", "train the paper's recipe and ours on enwik8"),
    "bench train-step": Command("spanformer.cli.bench", "TRAIN_STEP", "time a training step beside the paper's code"),
    "report attention": Command("spanformer.cli.report", "ATTENTION", "tables and pictures of an attention benchmark"),
}
"""Two words are looked up before one: `report attention FILE` and `report RUN` can both be commands."""
ABOUT = "spanformer: attention heads that learn how far to look, and cost only that much."
FIRST = "Begin with:  spanformer train runs/demo.toml      (three minutes; ends with a report to look at)"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A mistake in its options ends with one sentence and exit code 2, never with a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        words, rest = find(arguments)
        leaf: Leaf = getattr(importlib.import_module(COMMANDS[words].module), COMMANDS[words].name)
        leaf.run(_parse(leaf, f"spanformer {words}", rest))
    except BrokenPipeError:  # who reads the output has had enough of it, as in `spanformer … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        raise SystemExit(141) from None
    except OSError as error:
        _end(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), 2)
    except (ValueError, ImportError) as error:
        _end(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _end(f"there is not enough memory ({(str(error) or 'MemoryError').splitlines()[0]}); ask for smaller sizes", 2)
    except Incomplete as error:
        _end(str(error), 1)
    except KeyboardInterrupt as stop:
        _end(str(stop) or "stopped", 130)


def find(arguments: list[str]) -> tuple[str, list[str]]:
    """The words of the command, and the arguments after them; prints help and the version where they are asked for."""
    for count in (2, 1):
        words = " ".join(arguments[:count])
        if words in COMMANDS:
            return words, arguments[count:]
    first, second = [*arguments, "--help", "--help"][:2]
    if first in HELP:
        _help(COMMANDS)
    if first == "--version":
        print("spanformer", spanformer.__version__)
        raise SystemExit(0)
    group = [words for words in COMMANDS if words.startswith(first + " ")]
    if not group:
        names = dict.fromkeys(words.split()[0] for words in COMMANDS)
        raise ValueError(f"there is no command {first!r}; expected one of {', '.join(names)} (see spanformer --help)")
    if second in HELP:
        _help(group)
    raise ValueError(f"there is no command '{first} {second}'; expected {' or '.join(group)}")


def _parse(leaf: Leaf, program: str, arguments: list[str]) -> object:
    if leaf.parse is not None:
        return leaf.parse(program, arguments)
    from spanformer.cli.options import parse_options

    return parse_options(leaf.options, program, arguments)


def _out_of_memory(error: Exception) -> bool:
    """torch has no type of its own for a size that a CPU cannot have."""
    said = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def _help(commands: Iterable[str]) -> NoReturn:
    width = 2 + max(map(len, COMMANDS))
    lines = [words.ljust(width) + COMMANDS[words].help for words in commands]
    print(ABOUT, "", "Commands:", *("  spanformer " + line for line in lines), "", sep="\n")
    if commands is COMMANDS:
        print(FIRST)
    print("Every command explains its options:  spanformer COMMAND --help")
    raise SystemExit(0)


def _end(sentence: str, code: int) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)  # under torchrun the first process says most likely the same, and torchrun then ends this one
    print("spanformer: " + printable(" ".join(sentence.split())), file=sys.stderr)
    raise SystemExit(code)
