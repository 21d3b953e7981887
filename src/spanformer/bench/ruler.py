"""`spanformer bench ruler`: RULER's tasks, loss and pass keys against the bytes of the KV cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from spanformer.bench.ruler_questions import Task, read_tasks
from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.processor import named_dtype
from spanformer.core.text import printable, read_text
from spanformer.report.ruler_table import check_rows, needle_table, ordered, table


@dataclass(frozen=True)
class RulerBench(BenchOptions):
    """Measure how well a pretrained model answers RULER's questions from a KV cache of few bytes.

        spanformer bench ruler SMOLLM2 SMOLLM2@0.33 out/fit --tasks out/ruler-2048 --kv-bits 16 8 4
        spanformer bench ruler SMOLLM2@preset:SmolLM2-135M-Instruct-1of3 --tasks out/ruler-2048 --text valid.txt

    Models are folders in Hugging Face's format (those of fit-spans included), .gguf files, or names on the hub;
    NAME@0.33 has uniform windows that keep that share of the KV cache, and NAME@preset:PRESET the spans of a preset.
    benchmarks/ruler_tasks.py writes the questions. All rows get the same ones, and answer greedily. A row stays in the
    result file until it is measured again, so a later command adds rows. --rounds and --budget have no effect.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """models to measure; none: print and draw the rows of the result file again"""
    tasks: str = ""
    """the questions: a folder of .jsonl files, one file, or a glob; all of one length"""
    samples: int = 0
    """number of questions of each task, the first of its file. Default: all (with --quick: 1)"""
    kv_bits: tuple[Literal[16, 8, 4], ...] = (16,)
    """bits of a number in the KV cache; each is a row"""
    text: str = ""
    """also measure bits per byte of this text (a file, a folder or a glob), on the second half of windows of --context
    tokens"""
    texts: int = 8
    """windows of the text (with --quick: 2)"""
    needles: int = 0
    """also ask for this many pass keys at each depth of texts of --context tokens, a half and a quarter of it"""
    depths: int = 5
    """of the pass keys, from the beginning of the text to just before the question"""
    context: int = 0
    """tokens of a text, and those for which uniform windows keep their share. Default: the longest question"""
    sink_tokens: int = 4
    """first tokens that stay visible beside uniform windows"""
    seed: int = 0
    """of the pass keys"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of the model, and of its KV cache in 16 bits. auto: bfloat16 if the CPU multiplies it well"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models is {list(self.models)}; expected each model once")
        for name, least in (("samples", 0), ("texts", 1), ("needles", 0), ("depths", 2), ("context", 0),
                            ("sink_tokens", 0), ("seed", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not self.kv_bits or len(set(self.kv_bits)) < len(self.kv_bits):
            raise ValueError(f"kv_bits is {list(self.kv_bits)}; expected some of 16, 8 and 4, each once")
        if self.models and not self.tasks:
            raise ValueError("tasks is empty; expected the folder of questions that benchmarks/ruler_tasks.py wrote")


def run(bench: Bench[RulerBench]) -> None:
    o = bench.options
    if not o.models and not bench.file.parts:
        raise ValueError("no model is named; expected at least one, such as a pretrained model's folder")
    check_rows(bench.file.parts, bench.file.path)
    if o.models:
        tasks = read_tasks(o.tasks, o.samples or o.size(0, 1))
        for name in o.models:
            for bits in o.kv_bits:
                keep_row(bench, name, bits, tasks)
    show(bench)


def keep_row(bench: Bench[RulerBench], name: str, bits: Literal[16, 8, 4], tasks: dict[str, Task]) -> None:
    """Measure a row and write it to the result file."""
    from spanformer.bench.ruler_models import RulerModel

    o, title = bench.options, name if bits == 16 else f"{name}, {bits} bits"
    bench.report(f"loading {title}", 0, 0)
    questions = [question for task in tasks.values() for question in task.questions]
    context, dtype = o.context or max(question.length for question in questions), named_dtype(o.dtype)
    model = RulerModel(name, bits, dtype, context=context, sink_tokens=o.sink_tokens)
    model.check_lengths(questions, context)
    texts = _texts(o, model.tokenizer, context) if o.text else None
    contexts = tuple(sorted({max(1, context // n) for n in (4, 2, 1)}))
    settings = {
        "questions": {name: task.digest for name, task in tasks.items()}, "context": context,
        "dtype": str(dtype).removeprefix("torch."), "text": texts and _described(texts),
        "needles": {"tasks": o.needles, "depths": o.depths, "seed": o.seed} if o.needles else None,
    }  # fmt: skip
    bench.file.check_settings(title, settings)
    bench.keep(title, measure(bench, title, model, tasks, texts, contexts) | {"settings": settings})


def measure(
    bench: Bench[RulerBench], title: str, model: Any, tasks: dict[str, Task], texts: Any, contexts: tuple[int, ...]
) -> dict[str, Any]:
    """One row."""
    o, done = bench.options, 0
    total = sum(len(task.questions) for task in tasks.values()) + (len(texts) if texts else 0)
    total += o.needles * o.depths * len(contexts)

    def tick() -> None:
        nonlocal done
        done += 1
        bench.report(f"asking {title}", done, total)

    found: dict[str, Any] = {"of": model.path, "full": model.full, "bits": model.bits, "tasks": {}}
    if o.needles:
        found["needles"] = model.needles(contexts, o.depths, o.needles, o.seed, tick)
    if texts:
        found["loss"] = model.loss(texts, tick)
    for name, task in tasks.items():
        answers = []
        for question in task.questions:
            answers.append(model.answer(question))
            tick()
        found["tasks"][name] = {
            "scores": [each.score for each in answers],
            "kv_bytes": [each.kv_bytes for each in answers],
        }
    return found


def _texts(o: RulerBench, tokenizer: Any, context: int) -> Any:
    from spanformer.hf.text import make_chunks

    start, limit = max(1, context // 2), min(o.texts, o.size(o.texts, 2))
    return make_chunks(read_text(o.text), tokenizer, context=context, start=start, limit=limit)


def _described(texts: Any) -> dict[str, Any]:
    """What identifies texts, so that another program can find out whether it has the same tokens."""
    digest = hashlib.sha256(" ".join(map(str, texts.ids.flatten().tolist())).encode()).hexdigest()[:16]
    return {"windows": len(texts), "context": texts.context, "start": texts.start, "digest": digest}


def show(bench: Bench[RulerBench]) -> None:
    """Print the tables, and draw them."""
    from spanformer.report.ruler_picture import draw_needles, draw_ruler

    rows, path = ordered(check_rows(bench.file.parts, bench.file.path)), bench.file.path
    bench.say(f"\n{table(rows)}\n")
    for name, row in rows.items():
        if row.get("needles"):
            bench.say(f"{printable(name)}: pass keys, % found\n{needle_table(row)}\n")
    bench.say(f"picture: {printable(draw_ruler(rows, path.with_suffix('.png')))}")
    if any(row.get("needles") for row in rows.values()):
        bench.say(f"picture: {printable(draw_needles(rows, path.with_name(f'{path.stem}-needles.png')))}")


OPTIONS = RulerBench
