"""Learn windows in the form that other engines hold: each layer sees everything or has the one window of all others,
and each query head has a sink logit in place of sink tokens.

1. For each number of layers that see everything, the budget leaves one window for the others. The survey
   (layer_survey.py) says which layers lose least with it, and all of them together.
2. The cheapest patterns are tried on texts kept aside; the best is kept.
3. The sink logits of layers with the window learn by Adam on KL(full model ‖ model with windows). Loss counts on all
   positions, because a sink logit takes weight also where the window does not yet hide anything.

Shapes: L layers, H query heads, Hkv key/value heads, G windows surveyed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanformer.core.events import NoteEvent, ProgressEvent
from spanformer.hf.fit import FitConfig, backward_kl, full_states, set_windows, trial
from spanformer.hf.fit_events import OnFitEvent, Trial, WindowStep
from spanformer.hf.layer_survey import LayerCosts
from spanformer.hf.spans import NO_SINK, HeadSpans, head_spans
from spanformer.hf.text import TextChunks, hidden_states
from spanformer.model.budget import Budget

TRIED = 12
"""patterns that are tried on texts kept aside: the survey prices layers one by one, and together they cost more"""


@dataclass(frozen=True, eq=False)
class Pattern:
    window: int
    local: tuple[bool, ...]
    """[L] whether the layer has the window"""
    cost: float
    """what the survey says that it costs, in nats per token"""
    sink_logits: Tensor
    """[L, H], NO_SINK in layers that see everything"""

    def windows(self, context: int, kv_heads: int) -> Tensor:
        """[L, Hkv] tokens that heads keep of a text of this length."""
        each = torch.where(torch.tensor(self.local), self.window, context)
        return each[:, None].expand(-1, kv_heads).contiguous()

    def growth(self, kv_heads: int) -> Tensor:
        """[L, Hkv] 1 in layers that see everything"""
        return (~torch.tensor(self.local)).float()[:, None].expand(-1, kv_heads).contiguous()

    def text(self) -> str:
        return f"{sum(self.local)} of {len(self.local)} layers have a window of {self.window:,} tokens"


def patterns(found: LayerCosts, grid: list[int], budget: Budget) -> list[Pattern]:
    """One for each number of layers that see everything, within the budget; the cheapest first."""
    layers = len(found.costs)
    curves = torch.cat([found.costs, torch.zeros(layers, 1)], 1).double().numpy()
    places = [*grid, budget.context]
    made = []
    for every in range(layers):
        left = (budget.tokens * layers - budget.context * every) / (layers - every)
        window = min(int(left + 1e-6), budget.context)
        if window < 1:
            break
        costs = torch.tensor([float(np.interp(window, places, curve)) for curve in curves])
        order = costs.argsort(descending=True)
        local = torch.ones(layers, dtype=torch.bool)
        local[order[:every]] = False
        nearest = min(range(len(grid)), key=lambda n: abs(math.log(grid[n] / window)))
        logits = torch.where(local[:, None], found.sink_logits[..., nearest], NO_SINK)
        made.append(Pattern(window, tuple(local.tolist()), float(costs[local].sum()), logits))
    return sorted(made, key=lambda each: each.cost)


@torch.no_grad()
def set_sinks(layers: list[HeadSpans], logits: Tensor | None) -> None:
    """Sink logits [L, H]; None: ones that take no weight."""
    for n, spans in enumerate(layers):
        assert spans.sink_logits is not None
        spans.sink_logits.fill_(NO_SINK) if logits is None else spans.sink_logits.copy_(logits[n])


def get_sinks(layers: list[HeadSpans]) -> Tensor:
    return torch.stack([spans.sink_logits.detach().clone() for spans in layers if spans.sink_logits is not None])


class LayerFit:
    """A model with sink logits attached, texts to learn from and to choose on, and a survey's patterns."""

    def __init__(
        self, model: PreTrainedModel, texts: TextChunks, trials: TextChunks, config: FitConfig, on_event: OnFitEvent
    ) -> None:
        self.model, self.texts, self.trials, self.config, self.on_event = model, texts, trials, config, on_event
        self.layers = list(head_spans(model).values())
        self.kv_heads = self.layers[0].groups
        self.reference = [self._full(row, trials.start) for row in trials.ids]

    def learn(self, some: list[Pattern]) -> Pattern:
        """The best of these patterns, with learned sink logits; the model is left with it."""
        tried = []
        for n, pattern in enumerate(some[:TRIED]):
            self.on_event(ProgressEvent("trying patterns", n, min(TRIED, len(some))))
            tried.append(self.trial(pattern, pattern.sink_logits))
            said = f"{pattern.text()}, the others see all: {tried[-1]:.4f} nats"
            self.on_event(NoteEvent(0, f"{said} (the survey says {pattern.cost:.4f})"))
        best = min(range(len(tried)), key=tried.__getitem__)
        self.on_event(Trial(0, tried[best]))
        logits = self._learn_sinks(some[best], tried[best])
        set_sinks(self.layers, logits)
        set_windows(self.model, some[best].windows(self.texts.context, self.kv_heads))
        return replace(some[best], sink_logits=logits)

    def trial(self, pattern: Pattern, logits: Tensor | None) -> float:
        """KL from the full model on the texts kept aside, in nats per token."""
        set_sinks(self.layers, logits)
        return trial(self.model, pattern.windows(self.texts.context, self.kv_heads), self.trials, self.reference)

    def _learn_sinks(self, pattern: Pattern, lowest: float) -> Tensor:
        config, begun = self.config, time.monotonic()
        best, worse = pattern.sink_logits, 0
        chosen = [spans.sink_logits for spans, local in zip(self.layers, pattern.local, strict=True) if local]
        parameters = [p for p in chosen if p is not None]
        adam = torch.optim.Adam(parameters, lr=config.lr, betas=(0.8, 0.95))
        teacher: dict[int, Tensor] = {}
        set_sinks(self.layers, best)
        for step in range(1, config.steps + 1):
            number, scale = (step - 1) % len(self.texts), 1 - 0.9 * (step - 1) / config.steps
            if number not in teacher:
                now = get_sinks(self.layers)
                teacher[number] = self._full(self.texts.ids[number], self.texts.start)
                set_sinks(self.layers, now)
            windows = pattern.windows(self.texts.context, self.kv_heads)
            set_windows(self.model, windows)
            loss, norm = self._step(adam, parameters, number, teacher[number], config.lr * scale)
            self.on_event(WindowStep(
                step, kl=loss, price=0.0, ramp=1.0, lr=config.lr * scale, grad_norm=norm,
                seconds=time.monotonic() - begun, windows=windows.tolist(),
            ))  # fmt: skip
            late = bool(config.minutes) and time.monotonic() - begun > 60 * config.minutes
            if step % config.check and step != config.steps and not late:
                continue
            self.on_event(ProgressEvent(f"step {step}: trying sink logits", step, config.steps))
            now = get_sinks(self.layers)
            found = self.trial(pattern, now)
            self.on_event(Trial(step, found))
            worse = 0 if found < lowest else worse + 1
            lowest, best = (found, now) if found < lowest else (lowest, best)
            if late or worse >= config.patience:
                self.on_event(NoteEvent(step, "out of time" if late else f"no gain in {worse} trials: stopped"))
                break
        return best

    def _step(
        self, adam: torch.optim.Adam, parameters: list[torch.nn.Parameter], number: int, wanted: Tensor, lr: float
    ) -> tuple[float, float]:
        """(KL in nats per token, norm of the gradient)"""
        for p in parameters:
            p.requires_grad_(True)
        states = hidden_states(self.model, self.texts.ids[number][None], self.texts.start)[0]
        loss = backward_kl(self.model, states, wanted)
        norm = math.hypot(*(float(p.grad.norm()) for p in parameters if p.grad is not None))
        adam.param_groups[0]["lr"] = lr
        adam.step()
        adam.zero_grad()
        for p in parameters:
            p.requires_grad_(False)
        return loss, norm

    def _full(self, ids: Tensor, start: int) -> Tensor:
        set_sinks(self.layers, None)
        return full_states(self.model, ids, start, self.texts.context)
