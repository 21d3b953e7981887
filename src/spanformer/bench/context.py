"""`spanformer bench context`: what a model makes of long context, and what the context costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from spanformer.bench.context_models import ContextModel, HuggingFaceModel, OurModel, named_model
from spanformer.bench.context_tasks import copied, found_facts, loss_by_position, read_source
from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.processor import named_dtype
from spanformer.core.text import printable
from spanformer.report.compare_table import markdown
from spanformer.report.context_picture import draw_context

TASKS = {"key": "pass key", "pair": "recall", "copy": "copy"}
Row = dict[str, Any]


@dataclass(frozen=True)
class ContextBench(BenchOptions):
    """Measure the use of long context against its cost: loss by position, long code, pass key, recall and copy against
    distance, beside bytes of the KV cache, FLOPs and time of a token.

        spanformer bench context out/enwik8 out/compare/full --text enwik8 --context 1024
        spanformer bench context SMOLLM2 SMOLLM2@0.33 out/fit --text wikitext.txt --threads 1

    Models are run or model folders of this project, folders in Hugging Face's format (those of fit-spans included),
    .gguf files, or names on the hub; NAME@0.33 has uniform windows that keep that share of the KV cache, and
    NAME@preset:PRESET the spans of a preset. All get the same texts and facts, one at a time. A model's row stays in
    the result file until it is measured again, so a later command adds rows. --budget has no effect.
    """

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """models to measure; none: print and draw the rows of the result file again"""
    text: str = ""
    """long prose: a file, a folder or a glob; empty: only code"""
    code: str = "stdlib"
    """long code; stdlib: the largest modules of the Python standard library"""
    context: int = 0
    """tokens of a text. Default: 2048 (with --quick: 256)"""
    distances: tuple[int, ...] = ()
    """tokens between a fact and its question. Default: context, a half, a quarter and an eighth of it"""
    texts: int = 0
    """windows of each text. Default: 8 (with --quick: 2)"""
    tasks: int = 0
    """facts of each kind and distance. Default: 8 (with --quick: 2)"""
    seed: int = 0
    """of the facts"""
    sink_tokens: int = 4
    """first tokens that stay visible beside uniform windows"""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """number format of pretrained models. auto: bfloat16 if the CPU multiplies it well"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models is {list(self.models)}; expected each model once")
        for name in ("context", "texts", "tasks", "seed", "sink_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not self.text and not self.code:
            raise ValueError("text and code are both empty; expected at least one, whose loss is measured by position")
        if self.distances and not 1 <= min(self.distances) <= max(self.distances) <= self.longest:
            raise ValueError(f"distances is {list(self.distances)}; expected 1 … {self.longest}, the context")

    @property
    def longest(self) -> int:
        return self.context or self.size(2048, 256)

    def asked(self) -> list[int]:
        return sorted(set(self.distances)) or [self.longest // n for n in (8, 4, 2, 1) if self.longest // n >= 128]


def run(bench: Bench[ContextBench]) -> None:
    o = bench.options
    if not o.models and not bench.file.parts:
        raise ValueError("no model is named; expected at least one, such as a run's folder or a pretrained model")
    for name in o.models:
        bench.begin(f"loading {name}")
        keep_row(bench, name, open_model(name, o))
    show(bench, {name: part["found"] for name, part in bench.file.parts.items()})


def add_row(name: str, model: ContextModel, options: ContextBench) -> None:
    """Measure a model of another library, and print and draw the result file with its row."""
    bench = Bench("context", options, say=print)
    with bench.settings():
        keep_row(bench, name, model)
    show(bench, {name: part["found"] for name, part in bench.file.parts.items()})


def keep_row(bench: Bench[ContextBench], name: str, model: ContextModel) -> None:
    o = bench.options
    texts = {part: read_source(source) for part, source in (("text", o.text), ("code", o.code)) if source}
    settings = equal_settings(o, texts)
    bench.file.check_settings(name, settings)
    bench.keep(name, measure(bench, name, model, texts) | {"settings": settings})


def equal_settings(o: ContextBench, texts: dict[str, str]) -> Row:
    """What must be the same for rows of one table."""
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}
    return {
        "context": o.longest, "distances": o.asked(), "texts": o.texts or o.size(8, 2),
        "tasks": o.tasks or o.size(8, 2), "seed": o.seed, "threads": o.threads, "digests": digests,
    }  # fmt: skip


def open_model(name: str, o: ContextBench) -> ContextModel:
    from spanformer.model.folder import META

    path, share, preset = named_model(name)
    if (Path(path) / META).exists() or (Path(path) / "checkpoints").is_dir():
        if share or preset:
            raise ValueError(
                f"{name} asks for {preset or 'uniform windows'} in a model of this project; train it with window(…) "
                "instead"
            )
        return OurModel(path)
    return HuggingFaceModel(path, named_dtype(o.dtype), share, o.longest, o.sink_tokens, preset)


def measure(bench: Bench[ContextBench], name: str, model: ContextModel, texts: dict[str, str]) -> Row:
    """One row: everything that the model is asked, and its cost."""
    o, settings = bench.options, equal_settings(bench.options, texts)
    if model.longest and o.longest > model.longest:
        raise ValueError(
            f"context is {o.longest}, and {name} was made for {model.longest} tokens; ask for a shorter --context"
        )
    done, total = 0, len(texts) * settings["texts"] + len(TASKS) * len(settings["distances"]) * settings["tasks"]

    def tick() -> None:
        nonlocal done
        done += 1
        bench.report(f"asking {name}", done, total)

    row: Row = {
        part: loss_by_position(model, text, getattr(o, part), o.longest, settings["texts"], tick)
        for part, text in texts.items()
    }
    asks: dict[str, Callable[[int], float]] = {
        "key": lambda d: found_facts(model, "key", d, settings["tasks"], o.seed, tick),
        "pair": lambda d: found_facts(model, "pair", d, settings["tasks"], o.seed, tick),
        "copy": lambda d: copied(model, d, settings["tasks"], o.seed, tick),
    }
    row |= {ask: {str(d): of(d) for d in settings["distances"]} for ask, of in asks.items()}
    bench.report(f"timing {name}", 0, 0)
    return row | model.cost(o.longest, bench.rounds)._asdict()


def show(bench: Bench[ContextBench], rows: dict[str, Row]) -> None:
    """Print the table, and draw loss, facts and the fronts."""
    ordered = dict(sorted(rows.items(), key=lambda pair: late(pair[1])))
    bench.say(f"\n{table(ordered)}\n")
    bench.say(f"picture: {printable(draw_context(ordered, bench.file.path.with_suffix('.png')))}")


def late(row: Row) -> float:
    """Bits per byte in the last half of the context, of prose if there is some."""
    return row["text" if "text" in row else "code"][-1]["bits"]


def table(rows: dict[str, Row]) -> str:
    """Markdown: models in the order of their loss far into a text."""
    head = ["model", "text, early", "text, late", "code, early", "code, late", *(f"{t}, %" for t in TASKS.values()),
            "KV bytes", "MFLOPs a token", "ms a token"]  # fmt: skip
    return markdown(head, [[printable(name), *cells(row)] for name, row in rows.items()])


def cells(row: Row) -> list[str]:
    losses = [f"{row[part][at]['bits']:.3f}" if part in row else "–" for part in ("text", "code") for at in (0, -1)]
    facts = [f"{100 * sum(row[task].values()) / len(row[task]):.0f}" for task in TASKS]
    flops = "–" if row["flops"] is None or not math.isfinite(row["flops"]) else f"{row['flops'] / 1e6:,.2f}"
    return [*losses, *facts, f"{row['kv_bytes']:,}", flops, f"{1e3 * row['seconds']:.2f}"]


OPTIONS = ContextBench
