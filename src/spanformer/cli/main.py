"""The command line: finds a command by its one or two words, parses its options, and runs it.

A command module is imported only when its command runs, so `spanformer --help` is fast.
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
from spanformer.cli.command import HELP, Command, Incomplete
from spanformer.core.text import printable


@dataclass(frozen=True)
class Route:
    module: str
    """module with a Command of the name below"""
    name: str
    help: str


COMMANDS = {
    "train": Route("spanformer.cli.train", "TRAIN", "train a model from a run file"),
    "eval": Route("spanformer.cli.eval", "EVAL", "measure bits per character or perplexity on a text"),
    "generate": Route("spanformer.cli.generate", "GENERATE", "generate text from a prompt"),
    "score": Route("spanformer.cli.score", "SCORE", "compute the bits per character of any file, token by token"),
    "calibrate-exits": Route(
        "spanformer.cli.calibrate_exits",
        "CALIBRATE_EXITS",
        "choose when tokens leave the layers, with a guarantee",
    ),
    "spans": Route("spanformer.cli.spans", "SPANS", "print the learned span of every head, as a table and bars"),
    "heatmap": Route("spanformer.cli.heatmap", "HEATMAP", "draw the attention weights of every head over a text"),
    "report": Route("spanformer.cli.report", "RUNS", "write a page with pictures of one or several runs"),
    "show": Route("spanformer.cli.show", "SHOW", "draw which keys an attention pattern sees; print its cost"),
    "cost": Route("spanformer.cli.cost", "COST", "compute FLOPs, memory and KV cache of each mechanism"),
    "compare": Route("spanformer.cli.compare", "COMPARE", "train several mechanisms under equal conditions and report"),
    "sweep": Route("spanformer.cli.sweep", "SWEEP", "train with several span limits and compare the runs"),
    "datastore build": Route(
        "spanformer.cli.datastore", "BUILD", "store a text's contexts with the tokens that followed (kNN-LM)"
    ),
    "datastore fit": Route("spanformer.cli.datastore", "FIT", "fit temperature and λ on held-out text"),
    "datastore eval": Route("spanformer.cli.datastore", "EVAL", "measure bits per byte with and without a datastore"),
    "datastore index": Route("spanformer.cli.datastore", "INDEX", "make an index for a very large datastore (faiss)"),
    "datastore explain": Route(
        "spanformer.cli.datastore", "EXPLAIN", "print the neighbours of a context with their text"
    ),
    "data": Route("spanformer.cli.data", "DATA", "prepare a corpus and print its sizes"),
    "import-original": Route(
        "spanformer.cli.original", "IMPORT", "convert a checkpoint of the original adaptive-span code"
    ),
    "fit-spans": Route("spanformer.cli.fit_spans", "FIT", "learn spans for a pretrained model within a KV budget"),
    "probe": Route("spanformer.cli.probe", "PROBE", "measure what a model recalls from far back in a text"),
    "lm-eval": Route("spanformer.cli.lm_eval", "LM_EVAL", "run tasks of EleutherAI's evaluation harness on a model"),
    "export-gguf": Route(
        "spanformer.cli.export_gguf", "EXPORT_GGUF", "write learned windows into a quantised GGUF file, for llama.cpp"
    ),
    "export-windows": Route("spanformer.cli.export_windows", "EXPORT", "convert learned spans to one window per layer"),
    "bench attention": Route("spanformer.cli.bench", "ATTENTION", "time attention against comparable implementations"),
    "bench content": Route("spanformer.cli.bench", "CONTENT", "time LSH, routing and Linformer against SDPA"),
    "bench context": Route("spanformer.cli.bench", "CONTEXT", "measure the use of long context against its cost"),
    "bench decision": Route(
        "spanformer.cli.bench", "DECISION", "learn shortest paths and key-to-door from random steps"
    ),
    "bench decode": Route(
        "spanformer.cli.bench", "DECODE", "time decoding, prefill and streaming with per-head KV caches"
    ),
    "bench depth": Route("spanformer.cli.bench", "DEPTH", "train and decode with adaptive depth"),
    "bench fit-spans": Route(
        "spanformer.cli.bench", "FIT_SPANS", "measure loss of a pretrained model against its KV cache size"
    ),
    "bench gallery": Route(
        "spanformer.cli.bench", "GALLERY", "time every mechanism and position; write docs/gallery.md"
    ),
    "bench gpu": Route("spanformer.cli.bench", "GPU", "check and time the GPU kernels, also without a GPU"),
    "bench hf": Route("spanformer.cli.bench", "HF", "time a Hugging Face model with and without spans"),
    "bench knn": Route("spanformer.cli.bench", "KNN", "measure what a datastore saves a pretrained model"),
    "bench linear": Route("spanformer.cli.bench", "LINEAR", "time attention with a recurrent state against SDPA"),
    "bench longformer": Route("spanformer.cli.bench", "LONGFORMER", "time Longformer's pattern against a dense mask"),
    "bench memories": Route("spanformer.cli.bench", "MEMORIES", "measure what memories lose, and their time per token"),
    "bench patterns": Route("spanformer.cli.bench", "PATTERNS", "time fixed patterns against a dense mask"),
    "bench per-token": Route("spanformer.cli.bench", "PER_TOKEN", "measure time per token as the sequence grows"),
    "bench positions": Route("spanformer.cli.bench", "POSITIONS", "time position encodings against none"),
    "bench products": Route("spanformer.cli.bench", "PRODUCTS", "time matrix products, MKL against oneDNN"),
    "bench quality": Route("spanformer.cli.bench", "QUALITY", "train the paper's recipe and spanformer's on enwik8"),
    "bench rare": Route("spanformer.cli.bench", "RARE", "train heads on facts that are rarely asked for"),
    "bench retrieval": Route("spanformer.cli.bench", "RETRIEVAL", "measure retrieval heads of a Hugging Face model"),
    "bench reversible": Route("spanformer.cli.bench", "REVERSIBLE", "measure deep stacks that keep no activations"),
    "bench rl": Route("spanformer.cli.bench", "RL", "time policies with memory against sb3-contrib's RecurrentPPO"),
    "bench ruler": Route("spanformer.cli.bench", "RULER", "ask a model RULER's questions with a smaller KV cache"),
    "bench search": Route("spanformer.cli.bench", "SEARCH", "time exact search over keys against faiss"),
    "bench tasks": Route("spanformer.cli.bench", "TASKS", "train tiny models to recall, copy and find"),
    "bench train-step": Route("spanformer.cli.bench", "TRAIN_STEP", "time a training step against the paper's code"),
    "rl train": Route("spanformer.cli.rl", "TRAIN", "train a policy with memory by PPO"),
    "rl eval": Route("spanformer.cli.rl", "EVAL", "play whole episodes with a trained policy"),
    "rl collect": Route("spanformer.cli.rl_decision", "COLLECT", "record episodes of random actions or of a policy"),
    "rl imitate": Route("spanformer.cli.rl_decision", "IMITATE", "train a Decision Transformer on recorded episodes"),
    "rl report": Route("spanformer.cli.rl", "REPORT", "draw learning curves, spans and attention of policies"),
    "report attention": Route(
        "spanformer.cli.report", "ATTENTION", "print and draw the results of an attention benchmark"
    ),
    "report seeds": Route("spanformer.cli.report", "SEEDS", "print one table of comparisons with different seeds"),
}
"""Two words are looked up before one: `report attention FILE` and `report RUN` can both be commands."""
ABOUT = "spanformer: attention heads that learn how far to look back, at a cost that shrinks with their spans."
FIRST = "Begin with:  spanformer train runs/demo.toml      (three minutes; ends with a report)"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A mistake in its options prints one sentence and exits with code 2, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # commands show their own progress; transformers has bars of tqdm
    try:
        words, rest = find(arguments)
        command: Command = getattr(importlib.import_module(COMMANDS[words].module), COMMANDS[words].name)
        command.run(_parse(command, f"spanformer {words}", rest))
    except BrokenPipeError:  # the reader closed the pipe, as in `spanformer … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        raise SystemExit(141) from None
    except OSError as error:
        _end(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), 2)
    except (ValueError, ImportError) as error:
        _end(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _end(f"out of memory ({(str(error) or 'MemoryError').splitlines()[0]}); choose smaller sizes", 2)
    except Incomplete as error:
        _end(str(error), 1)
    except KeyboardInterrupt as stop:
        _end(str(stop) or "stopped", 130)


def find(arguments: list[str]) -> tuple[str, list[str]]:
    """The words of the command, and the arguments after them; prints help or the version if requested."""
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


def _parse(command: Command, program: str, arguments: list[str]) -> object:
    if command.parse is not None:
        return command.parse(program, arguments)
    from spanformer.cli.options import parse_options

    return parse_options(command.options, program, arguments)


def _out_of_memory(error: Exception) -> bool:
    """By message: torch has no exception class for allocations that fail on a CPU."""
    said = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def _help(commands: Iterable[str]) -> NoReturn:
    width = 2 + max(map(len, COMMANDS))
    lines = [words.ljust(width) + COMMANDS[words].help for words in commands]
    print(ABOUT, "", "Commands:", *("  spanformer " + line for line in lines), "", sep="\n")
    if commands is COMMANDS:
        print(FIRST)
    print("Options of a command:  spanformer COMMAND --help")
    raise SystemExit(0)


def _end(sentence: str, code: int) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)  # under torchrun, rank 0 probably prints the same message, and torchrun then ends this process
    print("spanformer: " + printable(" ".join(sentence.split())), file=sys.stderr)
    raise SystemExit(code)
