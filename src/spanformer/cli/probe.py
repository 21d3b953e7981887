"""`spanformer probe MODEL`: measure what a model recalls from far back in a text, by context length and depth."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.files import write_text
from spanformer.core.text import printable


@dataclass(frozen=True)
class ProbeOptions:
    models: tyro.conf.Positional[tuple[str, ...]]
    """one or several models, such as a model and its fit-spans result: folders in Hugging Face's format (those of
    fit-spans included), .gguf files, or names on the Hugging Face Hub"""
    contexts: tuple[int, ...] = (512, 1024, 2048)
    """lengths of the texts in tokens"""
    depths: int = 5
    """number of positions of the hidden fact, from the beginning of the text to just before the question"""
    tasks: int = 4
    """texts per context length and depth"""
    seed: int = 0
    budget: float = 0.0
    """for comparison, also probe the last model with uniform windows that keep this share of the KV cache; 0: do not"""
    sink_tokens: int = 4
    """first tokens of the text that stay visible in addition to those windows"""
    save: str = ""
    """write the results to this file, as JSON"""
    picture: str = ""
    """draw the curves over depth to this file, such as probe.png"""

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts is {list(self.contexts)}; expected at least one length, each at least 1")
        for name, least in (("depths", 2), ("tasks", 1), ("budget", 0), ("sink_tokens", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")


def run(options: ProbeOptions) -> None:
    from spanformer.core.processor import computing_dtype
    from spanformer.hf.attach import attach, detach
    from spanformer.hf.baselines import uniform
    from spanformer.hf.fit import budget_of, check_layers, set_windows
    from spanformer.hf.probe import FINDS, Found, as_rows, probe, table
    from spanformer.hf.retrieval_heads import retrieve, stop_retrieving
    from spanformer.hf.saved import fitted_retrieval, load_fitted
    from spanformer.hf.spans import head_spans
    from spanformer.model.budget import Budget

    if not options.models or len(set(options.models)) < len(options.models):
        raise ValueError(f"models is {list(options.models)}; expected at least one model, each given once")
    budget = Budget(options.budget, max(options.contexts), options.sink_tokens) if options.budget else None
    found: dict[str, list[Found]] = {}
    with Progress() as report:

        def look(title: str) -> None:
            found[title] = []
            for find in FINDS:
                found[title] += probe(
                    model, tokenizer, contexts=options.contexts, depths=options.depths, tasks=options.tasks, find=find,
                    seed=options.seed, on_progress=functools.partial(report, f"{title}: {find}"),
                )  # fmt: skip

        for name in options.models:
            report(f"loading {name}", 0, 0)
            model, tokenizer, fitted = load_fitted(name)
            model.to(computing_dtype(model.dtype))  # pyright: ignore[reportArgumentType]
            retrieving = fitted_retrieval(name) if fitted else {}
            if retrieving:
                retrieve(model, **retrieving)
            look(f"{name}, {'its spans' if fitted else 'full attention'}{' and retrieval heads' if retrieving else ''}")
            if retrieving:
                stop_retrieving(model)
        if budget:
            if fitted:
                detach(model)
            attach(model, max_span=budget.context, sink_tokens=options.sink_tokens)
            spans = list(head_spans(model).values())
            check_layers(spans)
            budget = budget_of(spans, options.budget, budget.context, options.sink_tokens)
            set_windows(model, uniform(len(spans), spans[0].groups, budget))
            look(f"{name}, uniform windows of {options.budget:g}")
    for title, rows in found.items():
        for find, what in (("key", "pass keys in filler text"), ("pair", "boxes among others")):
            head = f"{printable(title)}: {what}, recalled exactly, and nats per token"
            print(table([row for row in rows if row.find == find], head))
    kept = {title: as_rows(rows) for title, rows in found.items()}
    if options.save:
        write_text(Path(options.save), json.dumps(kept, indent=1) + "\n")
    if options.picture:
        from spanformer.report.probe_pictures import depth_picture

        print(f"picture: {printable(depth_picture(kept).save(Path(options.picture)))}")


PROBE = Command(ProbeOptions, run)
