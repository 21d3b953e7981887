"""`spanformer lm-eval MODEL --tasks …`: the command line of EleutherAI's evaluation harness, with our models."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from spanformer.cli.command import HELP, Command

TASKS = ("--tasks", "-t", "--config", "-C")
"""options of the harness that name tasks, or a file which does"""


@dataclass(frozen=True)
class LmEvalOptions:
    """Run tasks of EleutherAI's evaluation harness (lm-eval) on a model.

    For example:  spanformer lm-eval out/demo --tasks lambada_openai --limit 50

    The model comes first. Everything after it except --bits is given to the harness's own command line unchanged, so
    its options work as its documentation says. Tasks are downloaded when they are first used; --include_path DIR adds
    tasks of your own, which may read local files.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model; or a folder in Hugging Face's format
    (one of fit-spans keeps its spans), a .gguf file, or a name on the Hugging Face Hub"""
    harness: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="--OPTION VALUE …")] = ()
    """options of the harness: --tasks A B (needed), --limit N, --num_fewshot N, --batch_size N, --device cpu,
    --gen_kwargs max_gen_toks=64, --apply_chat_template, --include_path DIR, --output_path DIR, --log_samples,
    --model_args dtype=float32 (of a Hugging Face model), …; lm-eval run --help explains them, and lm-eval ls tasks
    prints the names of tasks"""
    bits: Literal[0, 8, 4] = 0
    """8 or 4: store the KV cache in this many bits per number while generating; 0: in the model's dtype.
    (Log-likelihoods are computed without a KV cache.)"""


def parse(program: str, arguments: list[str]) -> LmEvalOptions:
    from spanformer.cli.options import parse_options

    if HELP.intersection(arguments):
        return parse_options(LmEvalOptions, program, ["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(f"MODEL is missing; expected it before all options (see {program} --help)")
    bits, harness = _take("--bits", arguments[1:])
    if not any(word.partition("=")[0] in TASKS for word in harness):
        raise ValueError(
            f"--tasks is missing; expected names of tasks, such as --tasks lambada_openai (see {program} --help)"
        )
    return replace(parse_options(LmEvalOptions, program, [arguments[0], *bits]), harness=tuple(harness))


def _take(option: str, words: list[str]) -> tuple[list[str], list[str]]:
    """The words of an option with one value, and the others."""
    at = next((n for n, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    end = at + (1 if "=" in "".join(words[at : at + 1]) else 2)
    return words[at:end], [*words[:at], *words[end:]]


def run(options: LmEvalOptions) -> None:
    from spanformer.cli.progress import Progress

    _check(options.model)
    with Progress(transient=True) as report:
        report("importing lm-eval", 0, 0)
        from spanformer.cli.harness import evaluate

        show = evaluate(options.model, list(options.harness), options.bits, report)
    print(show, end="")


def _check(model: str) -> None:
    """Say at once what would otherwise be said after torch and the harness are imported."""
    path = Path(model)
    if not path.exists() and (path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(
            f"{model} does not exist; expected the folder of a run or a model, a .gguf file, or a name on the hub"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError(
            "spanformer lm-eval runs EleutherAI's evaluation harness, which is not installed: "
            'pip install "spanformer[eval]"'
        )


LM_EVAL = Command(LmEvalOptions, run, parse)
