"""Questions as benchmarks/ruler_tasks.py and benchmarks/short_tasks.py write them, and the score of an answer.

A file holds one task, a line one question. The files come from another program: every field is checked.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Match = Literal["all", "any", "choice"]
CONTROL = re.compile(r"[\x00-\x1f]")
MOST_NEW = 4096
"""tokens of an answer"""


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    outputs: tuple[str, ...]
    match: Match
    """all: the score is the share of outputs that the answer holds; any: 1 if it holds one of them; choice: outputs are
    continuations of the prompt, and the score is 1 if the right one is the likeliest"""
    new_tokens: int
    length: int
    """tokens of the prompt and of the longest answer, as the program counted them that wrote the file"""
    right: int = 0
    """of a choice: the index of the right output"""


@dataclass(frozen=True)
class Task:
    questions: tuple[Question, ...]
    digest: str
    """of its lines"""


def score(answer: str, question: Question) -> float:
    """RULER's string match, 0 to 1: the share of outputs that occur in the answer, or whether any does. Case and
    surrounding white space do not count."""
    said = CONTROL.sub("\n", answer.strip()).strip().lower()
    found = [output.lower() in said for output in question.outputs]
    return float(any(found)) if question.match == "any" else sum(found) / len(found)


def read_tasks(source: str, samples: int = 0) -> dict[str, Task]:
    """Tasks by name. source: a file, a folder or a glob; samples: number of questions of each, the first of
    its file; 0: all."""
    path = Path(source)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [Path(name) for name in sorted(glob.glob(source))]
    if not files:
        raise ValueError(f"tasks is {source}, which holds no .jsonl file; write some by benchmarks/ruler_tasks.py")
    tasks: dict[str, Task] = {}
    for file in files:
        task = read_task(file, samples)
        name = task.questions[0].task
        if name in tasks:
            raise ValueError(f"{file} holds the task {name}, as another file does; measure each length by itself")
        tasks[name] = task
    return tasks


def read_task(file: Path, samples: int) -> Task:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8 ({error}); write it by benchmarks/ruler_tasks.py") from None
    if len(lines) < max(1, samples):
        raise ValueError(f"{file} holds {len(lines)} questions; expected at least {max(1, samples)}")
    lines = lines[: samples or None]
    questions = tuple(_question(line, f"{file}, line {n}") for n, line in enumerate(lines, 1))
    if len(names := {question.task for question in questions}) > 1:
        raise ValueError(f"{file} holds the tasks {', '.join(sorted(names))}; expected a file for each")
    return Task(questions, hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object; write the file by benchmarks/ruler_tasks.py")

    def field(name: str, fits: bool, expected: str) -> Any:
        if not fits:
            shown = repr(row.get(name))
            raise ValueError(
                f"{where}: {name} is {shown if len(shown) < 60 else shown[:57] + '…'}; expected {expected}: write the "
                "file by benchmarks/ruler_tasks.py"
            )
        return row[name]

    outputs, match = row.get("outputs"), row.get("match")
    texts = isinstance(outputs, list) and bool(outputs) and all(isinstance(each, str) and each for each in outputs)
    number = {name: type(row.get(name)) is int and row[name] > 0 for name in ("new_tokens", "length")}
    right = texts and type(row.get("right")) is int and 0 <= row["right"] < len(row["outputs"])
    return Question(
        field("task", isinstance(row.get("task"), str) and bool(row["task"]), "a name"),
        field("input", isinstance(row.get("input"), str) and bool(row["input"]), "a prompt"),
        tuple(field("outputs", texts, "a list of texts, none of them empty")),
        field("match", match in ("all", "any", "choice"), "'all', 'any' or 'choice'"),
        field("new_tokens", number["new_tokens"] and row["new_tokens"] <= MOST_NEW, f"a number from 1 to {MOST_NEW}"),
        field("length", number["length"], "a number of tokens"),
        field("right", right, "the index of an output") if match == "choice" else 0,
    )
