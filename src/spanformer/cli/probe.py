"""`spanformer probe MODEL`: what a model still finds far back in a text, by context and depth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.leaf import Leaf
from spanformer.cli.waiting import waiting


@dataclass(frozen=True)
class ProbeOptions:
    model: tyro.conf.Positional[str]
    """a folder in Hugging Face's format (also one that fit-spans wrote), a .gguf file, or a name on the hub"""
    contexts: tuple[int, ...] = (512, 1024, 2048)
    """how many tokens the texts have"""
    depths: int = 5
    """places of the pass key, from the beginning to just before the question"""
    tasks: int = 4
    """texts of each context and depth"""
    seed: int = 0
    budget: float = 0.0
    """also with uniform windows of this share of the key/value memory, for comparison; 0: not"""
    sinks: int = 4
    """first tokens that stay visible beside those windows"""
    save: str = ""
    """a file for the figures, as JSON"""


def run(options: ProbeOptions) -> None:
    from spanformer.hf.attach import attach
    from spanformer.hf.baselines import uniform
    from spanformer.hf.controller import Budget
    from spanformer.hf.fit import set_windows, window_table
    from spanformer.hf.probe import as_rows, probe, table
    from spanformer.hf.saved import load_fitted

    budget = Budget(options.budget, max(options.contexts), options.sinks) if options.budget else None
    with waiting() as tell:
        tell("loading", 0, 1)
        model, tokenizer, fitted = load_fitted(options.model)

        def look(title: str):
            return probe(
                model, tokenizer, contexts=options.contexts, depths=options.depths, tasks=options.tasks,
                seed=options.seed, on_progress=lambda done, total: tell(title, done, total),
            )  # fmt: skip

        found = {"fitted spans" if fitted else "full attention": look("probing")}
        if budget:
            if not fitted:
                attach(model, max_span=budget.context, sinks=options.sinks)
            layers, heads = window_table(model).shape
            set_windows(model, uniform(layers, heads, budget))
            found[f"uniform windows, {options.budget:g} of the memory"] = look("probing uniform windows")
    for title, rows in found.items():
        print(table(rows, f"{title}: pass keys found, and nats of a token of the key"))
    if options.save:
        Path(options.save).write_text(json.dumps({title: as_rows(rows) for title, rows in found.items()}, indent=1))


PROBE = Leaf(ProbeOptions, run)
