"""`spanformer probe MODEL`: what a model still finds far back in a text, by context and depth."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.leaf import Leaf
from spanformer.cli.progress import Progress
from spanformer.core.files import write_text
from spanformer.core.text import printable


@dataclass(frozen=True)
class ProbeOptions:
    models: tyro.conf.Positional[tuple[str, ...]]
    """one or several, such as a model and what fit-spans made of it: folders in Hugging Face's format (also those that
    fit-spans wrote), .gguf files, or names on the hub"""
    contexts: tuple[int, ...] = (512, 1024, 2048)
    """how many tokens the texts have"""
    depths: int = 5
    """places of what is asked for, from the beginning to just before the question"""
    tasks: int = 4
    """texts of each context and depth"""
    seed: int = 0
    budget: float = 0.0
    """also the last model with uniform windows of this share of the key/value memory, for comparison; 0: not"""
    sinks: int = 4
    """first tokens that stay visible beside those windows"""
    save: str = ""
    """a file for the figures, as JSON"""
    picture: str = ""
    """a file for the curves over depth, such as probe.png"""

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts is {list(self.contexts)}; expected at least one, each of 1 token or more")
        for name, least in (("depths", 2), ("tasks", 1), ("budget", 0), ("sinks", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")


def run(options: ProbeOptions) -> None:
    from spanformer.core.processor import computing_dtype
    from spanformer.hf.attach import attach, detach
    from spanformer.hf.baselines import uniform
    from spanformer.hf.controller import Budget
    from spanformer.hf.fit import budget_of, check_layers, set_windows
    from spanformer.hf.probe import FINDS, Found, as_rows, probe, table
    from spanformer.hf.saved import load_fitted
    from spanformer.hf.spans import head_spans

    if not options.models or len(set(options.models)) < len(options.models):
        raise ValueError(f"models is {list(options.models)}; expected at least one, and none twice")
    budget = Budget(options.budget, max(options.contexts), options.sinks) if options.budget else None
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
            look(f"{name}, {'its spans' if fitted else 'full attention'}")
        if budget:
            if fitted:
                detach(model)
            attach(model, max_span=budget.context, sinks=options.sinks)
            spans = list(head_spans(model).values())
            check_layers(spans)
            budget = budget_of(spans, options.budget, budget.context, options.sinks)
            set_windows(model, uniform(len(spans), spans[0].groups, budget))
            look(f"{name}, uniform windows of {options.budget:g}")
    for title, rows in found.items():
        for find, what in (("key", "pass keys in filler"), ("pair", "boxes among others")):
            head = f"{printable(title)}: {what}, found whole, and nats of a token"
            print(table([row for row in rows if row.find == find], head))
    kept = {title: as_rows(rows) for title, rows in found.items()}
    if options.save:
        write_text(Path(options.save), json.dumps(kept, indent=1) + "\n")
    if options.picture:
        from spanformer.report.probe_pictures import depth_picture

        print(f"picture: {printable(depth_picture(kept).save(Path(options.picture)))}")


PROBE = Leaf(ProbeOptions, run)
