"""A fit of windows by layer from beginning to end: survey, choose, learn, measure beside windows by head."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.core.events import ProgressEvent
from spanformer.hf.baselines import by_mass, uniform
from spanformer.hf.fit import budget_of, set_windows
from spanformer.hf.fit_events import OnFitEvent
from spanformer.hf.layer_fit import LayerFit, patterns, set_sinks
from spanformer.hf.outcome import Outcome
from spanformer.hf.spans import HeadSpans
from spanformer.hf.survey import Survey
from spanformer.hf.text import bits_per_byte, spelt_chunks
from spanformer.model.budget import allocate

if TYPE_CHECKING:
    from spanformer.hf.plan import FitRun


def fit_layers(run: FitRun, on_event: OnFitEvent, found: Survey | None = None) -> Outcome:
    """found: an earlier survey with `layered`, to share between budgets."""
    begun = time.monotonic()
    bits = {"full": run.measure(None, "full", on_event)}
    found = found or run.survey(on_event)
    assert found.layered is not None
    budget = run.budget(run.share)
    fit = LayerFit(run.model, run.train, run.trials, replace(run.config(), lr=run.plan.sink_lr), on_event)
    pattern = fit.learn(patterns(found.layered, found.grid, budget))
    windows = pattern.windows(run.plan.length, run.layers[0].groups)
    growth = pattern.growth(run.layers[0].groups)
    bits["fitted windows"] = run.measure(windows, "fitted spans", on_event, growth)
    early = {"fitted windows": _beginnings(run, windows, growth, on_event)}
    set_sinks(run.layers, None)
    early = {"full": _beginnings(run, torch.full_like(windows, run.plan.length), None, on_event)} | early
    with sink_tokens_of(run.layers, run.plan.sink_tokens):
        apart = budget_of(run.layers, run.share, run.plan.length, run.plan.sink_tokens)
        others = {"windows by head, as surveyed": apart.whole(allocate(found.costs, found.grid, apart)[0])}
        if run.plan.baselines:
            others["uniform windows"] = uniform(len(windows), windows.shape[1], apart)
            others["by attention mass"] = by_mass(found.lost, found.grid, apart)
        bits |= {name: run.measure(other, name, on_event) for name, other in others.items()}
    set_sinks(run.layers, pattern.sink_logits)
    set_windows(run.model, windows, growth=growth)
    return Outcome(
        windows, budget.share_of(windows), bits, time.monotonic() - begun, False, growth=growth, form=pattern.text(),
        early=early,
    )  # fmt: skip


def _beginnings(run: FitRun, windows: Tensor, growth: Tensor | None, on_event: OnFitEvent) -> float:
    """Bits per byte before the positions that are measured otherwise."""
    texts = spelt_chunks(run.held_out.ids[:, : run.held_out.start], run.tokenizer, run.train.start)
    set_windows(run.model, windows, growth=growth)

    def progress(done: int, total: int) -> None:
        on_event(ProgressEvent("measuring: beginnings", done, total))

    return bits_per_byte(run.model, texts, progress)


@contextmanager
def sink_tokens_of(layers: list[HeadSpans], count: int) -> Iterator[None]:
    """Heads keep the first tokens for a while, as windows by head do."""
    before = [spans.sink_tokens for spans in layers]
    try:
        for spans in layers:
            spans.sink_tokens = count
        yield
    finally:
        for spans, own in zip(layers, before, strict=True):
            spans.sink_tokens = own
