"""`bench ruler`: RULER's scores by hand, answers as transformers generates them, files of others, and kept rows."""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.bench.context_models import named_model
from spanformer.bench.ruler_models import RulerModel
from spanformer.bench.ruler_questions import CONTROL, Question, read_tasks, score
from spanformer.cli.main import main
from spanformer.hf.text import bits_per_byte, load_model, make_chunks
from spanformer.report.ruler_picture import short_names
from spanformer.report.ruler_table import ceiling_of, check_rows, kv_bytes, mean_score, over, table
from support.byte_llama import PROSE, save_byte_llama

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("--threads", "1")


def question(*outputs: str, match: Any = "all", prompt: str = "a", new: int = 8) -> Question:
    return Question("vt", prompt, outputs, match, new, len(prompt) + new)


CASES = [
    (" 4711.", ("4711",), "all", 1.0),
    ("It is 471 1", ("4711",), "all", 0.0),
    ("alpha, GAMMA", ("Alpha", "beta", "gamma", "delta"), "all", 0.5),
    ("in france", ("Paris", "France"), "any", 1.0),
    ("nowhere", ("Paris", "France"), "any", 0.0),
    ("a\tb", ("a\nb",), "all", 1.0),  # control characters are line breaks
    ("\x00 ab \x01", ("ab",), "all", 1.0),
    ("", ("a",), "any", 0.0),
    ("aab", ("a", "a", "b"), "all", 1.0),
]


@pytest.mark.parametrize(("answer", "outputs", "match", "wanted"), CASES)
def test_score_is_rulers(answer: str, outputs: tuple[str, ...], match: str, wanted: float) -> None:
    assert score(answer, question(*outputs, match=match)) == wanted
    names: dict[str, Any] = {}
    for node in ast.parse((SCRIPTS / "kvpress_methods.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "string_match":  # which runs without spanformer
            exec(compile(ast.Module([node], []), "kvpress_methods.py", "exec"), names)
    assert names["string_match"](answer, {"outputs": outputs, "match": match}) == wanted


def lines(task: Any, count: int, **others: Any) -> str:
    rows = [
        {"task": task, "index": n, "input": f"{PROSE * 2}{n}. {task}:", "outputs": ["r", f"{n}"], "match": "all",
         "length": 215, "new_tokens": 6} | others
        for n in range(count)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_questions_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "vt.jsonl").write_text(lines("vt", 3))
    (tmp_path / "qa_1.jsonl").write_text(lines("qa_1", 2, match="any") + "\n")
    tasks = read_tasks(str(tmp_path))
    assert {name: len(task.questions) for name, task in tasks.items()} == {"qa_1": 2, "vt": 3}
    assert tasks["qa_1"].questions[1].match == "any" and tasks["vt"].questions[2].outputs == ("r", "2")
    one = read_tasks(str(tmp_path / "v*.jsonl"), samples=2)["vt"]
    assert one.questions == tasks["vt"].questions[:2] and one.digest != tasks["vt"].digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "vt.jsonl holds 0 questions; expected at least 1"),
        ("[1]\n", "vt.jsonl, line 1 is not a JSON object; write the file by benchmarks/ruler_tasks.py"),
        (lines("vt", 1) + "{\n", "vt.jsonl, line 2 is not a JSON object"),
        (lines("vt", 1, input=""), "line 1: input is ''; expected a prompt"),
        (lines("vt", 1, outputs=["a", ""]), r"line 1: outputs is \['a', ''\]; expected a list of texts"),
        (lines("vt", 1, outputs=[]), "expected a list of texts, none of them empty: write the file by"),
        (lines("vt", 1, match="some"), "match is 'some'; expected 'all', 'any' or 'choice'"),
        (lines("vt", 1, match="choice"), "right is None; expected the index of an output"),
        (lines("vt", 1, match="choice", right=2), "right is 2; expected the index of an output"),
        (lines("vt", 1, new_tokens=10**9), "new_tokens is 1000000000; expected a number from 1 to 4096"),
        (lines("vt", 1, new_tokens=True), "new_tokens is True; expected a number"),
        (lines("vt", 1, length=0.5), "length is 0.5; expected a number of tokens"),
        (lines(7, 1), "task is 7; expected a name"),
        (lines("vt", 1) + lines("cwe", 1), "holds the tasks cwe, vt; expected a file for each"),
    ],
)
def test_damaged_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "vt.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_tasks(str(tmp_path))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.jsonl file; write some by benchmarks/ruler_tasks\.py"):
        read_tasks(str(tmp_path))
    (tmp_path / "vt.jsonl").write_text(lines("vt", 1))
    with pytest.raises(ValueError, match="holds 1 questions; expected at least 2"):
        read_tasks(str(tmp_path), samples=2)
    (tmp_path / "vt-2.jsonl").write_text(lines("vt", 1))
    with pytest.raises(ValueError, match="holds the task vt, as another file does"):
        read_tasks(str(tmp_path))
    (tmp_path / "vt.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"vt\.jsonl is not a text in UTF-8"):
        read_tasks(str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ruler")
    save_byte_llama(path / "llama", 512)
    (path / "tasks").mkdir()
    (path / "tasks" / "vt.jsonl").write_text(lines("vt", 2))
    (path / "tasks" / "qa_1.jsonl").write_text(lines("qa_1", 2, match="any", outputs=["zzz", "{"]))
    (path / "prose.txt").write_text(PROSE * 20)
    return path


def opened(folder: Path, name: str, bits: Any = 16) -> RulerModel:
    return RulerModel(f"{folder}/{name}", bits, torch.float32, context=200, sink_tokens=4)


def written(model: Any, tokenizer: Any, prompt: str, new: int, **options: Any) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return tokenizer.decode(model.generate(ids, max_new_tokens=new, do_sample=False, **options)[0, ids.shape[1] :])


@pytest.mark.parametrize(("name", "bits"), [("llama", 16), ("llama@0.3", 16), ("llama@0.3", 8)])
def test_choice_is_the_likeliest_continuation(folder: Path, name: str, bits: Any) -> None:
    found, prompt, outputs = opened(folder, name, bits), PROSE * 2, (" ab", " a longer one", ".")
    cache = hf.SpanCache(found.model, bits=0 if bits == 16 else bits) if found.spans else None
    start, rates = found.tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1], []
    with torch.no_grad():
        for output in outputs:  # token by token, from a KV cache
            likely, kept = 0.0, copy.deepcopy(cache)
            ids = found.tokenizer(prompt + output, return_tensors="pt")["input_ids"]
            logits = found.model(input_ids=ids[:, :start], past_key_values=kept, use_cache=True)
            for t in range(start, ids.shape[1]):
                likely += float(logits.logits[0, -1].float().log_softmax(-1)[ids[0, t]])
                kept = logits.past_key_values
                logits = found.model(input_ids=ids[:, t : t + 1], past_key_values=kept)
            rates.append(likely / len(output))
    best = rates.index(max(rates))
    assert sorted(rates)[-1] - sorted(rates)[-2] > 0.01
    for right in range(3):
        asked = Question("piqa", prompt, outputs, "choice", 1, 300, right)
        assert found.answer(asked).score == (right == best)
    assert found.answer(asked).kv_bytes == found.kv_bytes(start) > 0
    long = Question("piqa", prompt, (" a", " b" * 300), "choice", 1, 300)
    with pytest.raises(ValueError, match="was made for 512; ask for shorter"):
        found.check_lengths([long], 100)


@pytest.mark.parametrize("name", ["llama", "llama@0.3"])
def test_answers_are_those_of_generate(folder: Path, name: str) -> None:
    found, prompt = opened(folder, name), PROSE * 2
    options = {"past_key_values": hf.SpanCache(found.model)} if "@" in name else {}
    text = written(found.model, found.tokenizer, prompt, 8, **options)
    said = CONTROL.sub("\n", text.strip()).strip()  # random weights write control characters, too
    assert len(said) > 1
    whole = found.answer(question(said, prompt=prompt))
    assert whole.score == 1.0 and whole.kv_bytes == found.kv_bytes(len(prompt.encode()))
    assert found.answer(question(said, f"{said}!", prompt=prompt)).score == 0.5
    assert found.answer(question(said[0], said, prompt=prompt)).score == 1.0  # the first is found before the second
    assert found.answer(question(said, prompt=prompt, new=1)).score < 1.0


def test_answer_ends_at_the_end_token_and_when_nothing_can_change(folder: Path) -> None:
    found = opened(folder, "llama")
    text = written(found.model, found.tokenizer, PROSE, 3)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    hook = found.model.register_forward_hook(count)
    found.answer(question(text[0], prompt=PROSE, new=50))
    assert steps == 1  # the first token holds all that is asked for
    found.ends = {found.tokenizer(text)["input_ids"][0]}
    assert found.answer(question(text[0], prompt=PROSE, new=50)).score == 0.0 and steps == 2
    hook.remove()


def test_kv_cache_is_as_large_as_its_bits_and_windows(folder: Path) -> None:
    asked = question("never", prompt="x" * 200, new=1)
    held = {bits: opened(folder, "llama", bits).answer(asked).kv_bytes for bits in (16, 8)}
    assert held[16] == 2 * 2 * 2 * 200 * 8 * 4  # layers, key and value, heads, tokens, size, bytes of float32
    assert held[8] == held[16] * (8 + 4) // 32  # numbers of one byte, and a scale of four
    assert opened(folder, "llama@0.25").answer(asked).kv_bytes == held[16] // 4


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_loss_is_that_of_a_kv_cache_of_these_bits(folder: Path, bits: int) -> None:
    plain, tokenizer = load_model(f"{folder}/llama")
    texts = make_chunks(PROSE * 20, tokenizer, context=160, start=80, limit=2)
    found, full = opened(folder, "llama", bits).loss(texts, lambda: None), bits_per_byte(plain, texts)
    assert found["bits_per_byte"] == (pytest.approx(full) if bits == 16 else pytest.approx(full, rel=0.05))
    assert bits == 16 or found["bits_per_byte"] != full
    held = opened(folder, "llama", bits)
    assert list(found["at"]) == [str(n) for n in range(80, 161, 10)] and found["at"]["90"] == held.kv_bytes(90)
    assert found["kv_bytes"] == pytest.approx((held.kv_bytes(80) + held.kv_bytes(159)) / 2)


def test_model_is_named_with_windows_or_a_preset(folder: Path) -> None:
    assert named_model("a/b") == ("a/b", 0.0, "") and named_model("a@b") == ("a@b", 0.0, "")
    assert named_model("a@b@0.33") == ("a@b", 0.33, "") and named_model("a@preset:x") == ("a", 0.0, "preset:x")
    with pytest.raises(ValueError, match="were learned for another model"):
        opened(folder, "llama@preset:SmolLM2-135M-Instruct-1of3")
    with pytest.raises(ValueError, match="there is no preset 'x'; expected one of"):
        opened(folder, "llama@preset:x")


@contextmanager
def refused(capsys: Any) -> Iterator[list[str]]:
    found: list[str] = []
    with pytest.raises(SystemExit) as end:
        yield found
    assert end.value.code == 2
    found.append(capsys.readouterr().err)


def test_rows_are_kept_beside_each_other(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out, full = tmp_path / "ruler.json", f"{folder}/llama"
    asked = [*SMALL, "--tasks", str(folder / "tasks"), "--text", str(folder / "prose.txt"), "--texts", "1",
             "--needles", "1", "--depths", "2", "--context", "480", "--out", str(out)]  # fmt: skip
    main(["bench", "ruler", full, *asked, "--kv-bits", "16", "8"])
    main(["bench", "ruler", f"{full}@0.25", *asked])
    shown = capsys.readouterr().out
    assert "| model | KV cache, MB | qa_1 | vt | mean | over full | bits per byte | from KV cache, MB |" in shown
    assert "| tokens | depth 0 | depth 1 |" in shown
    for name in ("ruler.png", "ruler-needles.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and name in shown
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == [full, f"{full}, 8 bits", f"{full}@0.25"]
    rows = {name: part["found"] for name, part in parts.items()}
    assert [row["full"] for row in rows.values()] == [True, True, False]
    assert kv_bytes(rows[f"{full}@0.25"]) < kv_bytes(rows[full]) and len(rows[full]["needles"]) == 3 * 2
    main(["bench", "ruler", full, *asked])
    again = json.loads(out.read_text())["parts"]
    assert again[full]["found"] == rows[full] and list(again) == list(parts)
    with refused(capsys) as said:
        main(["bench", "ruler", f"{full}@0.3", *asked, "--samples", "1"])
    assert "measured with other questions, texts or settings" in said[0]
    assert list(json.loads(out.read_text())["parts"]) == list(parts)
    main(["bench", "ruler", "--out", str(out)])  # the table again
    assert capsys.readouterr().out.count("\n| ") > 4


def a_row(scores: list[float], held: int, *, full: bool = False, of: str = "m") -> dict[str, Any]:
    task = {"scores": scores, "kv_bytes": [held] * len(scores)}
    return {"of": of, "full": full, "bits": 16, "settings": {"context": 1}, "tasks": {"vt": task}}


def test_table_shows_the_full_models_score_beside_each() -> None:
    rows = {"m": a_row([1.0, 0.5, 0.0, 0.5], 4_000_000, full=True), "SnapKV": a_row([0.0, 0.5, 0.0, 0.5], 1_500_000)}
    assert table(rows).splitlines()[2:] == [
        "| m | 4.00 | 50 | 50.0 | – |",
        "| SnapKV | 1.50 | 25 / 50 | 25.0 / 50.0 | -25.0 ± 25.0 |",
    ]
    assert over(rows["SnapKV"], rows["m"]) == (-25.0, pytest.approx(25.0)) and mean_score(rows["m"]) == 50.0
    rows["n"] = a_row([1.0] * 4, 9, full=True, of="n")
    rows["fit"] = a_row([1.0] * 4, 9, of="fit")
    assert [ceiling_of(name, rows) for name in rows] == ["m", "m", "n", None]
    assert "| fit | 0.00 | 100 | 100.0 | – |" in table(rows)
    long = ["m", "m, 8 bits", "m@0.3, 8 bits", "Snap, bytes of m@preset:small", "Snap, bytes of m"]
    assert list(short_names(dict.fromkeys(long, rows["m"]))) == [
        "everything", "everything, 8 bits", "uniform windows, 0.3, 8 bits", "Snap, bytes of learned spans small",
        "Snap, bytes of everything",
    ]  # fmt: skip
    assert list(short_names(rows)) == list(rows)
    one = {"m": a_row([1.0], 1, full=True), "x": a_row([0.0], 1)}
    assert "| -100.0 |" in table(one)  # one question: no error can be told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tasks": {}}, "no tasks as bench ruler"),
        ({"tasks": {"vt": {"scores": [2.0], "kv_bytes": [1]}}}, "no tasks"),
        ({"tasks": {"vt": {"scores": [1.0], "kv_bytes": [1, 2]}}}, "no tasks"),
        ({"settings": None}, "no settings"),
        ({"bits": 3}, "no model"),
        ({"loss": {"bits_per_byte": "low"}}, "no loss"),
        ({"needles": [{"depth": 0}]}, "no needles"),
        ({"settings": {"context": 2}}, "holds m and x, measured with other questions, texts or settings"),
    ],
)
def test_row_of_another_program_is_checked(change: dict[str, Any], said: str) -> None:
    rows = {"m": a_row([1.0], 1, full=True), "x": a_row([1.0], 1) | change}
    with pytest.raises(ValueError, match=said):
        check_rows({name: {"found": row} for name, row in rows.items()}, Path("ruler.json"))
    with pytest.raises(ValueError, match="the row x has no measurements"):
        check_rows({"x": {"found": None}}, Path("ruler.json"))


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path, capsys: Any) -> None:
    tasks, out = str(folder / "tasks"), str(tmp_path / "a.json")
    for words, wanted in (
        (["--out", out], "no model is named; expected at least one"),
        (["m"], "tasks is empty; expected the folder of questions"),
        (["m", "m", "--tasks", tasks], "expected each model once"),
        (["m", "--tasks", tasks, "--depths", "1"], "depths is 1; expected 2 or more"),
        (["m", "--tasks", tasks, "--kv-bits", "8", "8"], "kv_bits is [8, 8]; expected some of 16, 8 and 4, each once"),
        ([f"{folder}/llama", "--tasks", tasks, "--context", "600", "--out", out], "was made for 512; ask for shorter"),
    ):
        with refused(capsys) as said:
            main(["bench", "ruler", *words])
        assert wanted in said[0]


@pytest.mark.skipif(importlib.util.find_spec("long_context_eval") is not None, reason="RULER's package is here")
def test_writing_questions_needs_rulers_package(tmp_path: Path) -> None:
    words = ["--tokenizer", str(tmp_path), "--length", "99", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPTS / "ruler_tasks.py", *words], capture_output=True, text=True)
    assert done.returncode == 2 and "long_context_eval is not installed; docs/ruler.md shows how" in done.stderr
