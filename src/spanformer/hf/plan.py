"""One fit from beginning to end: load, survey, learn, measure, save. The command line and the benchmark both run it."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanformer.core.events import NoteEvent, ProgressEvent
from spanformer.core.shape import Shape
from spanformer.core.text import read_text
from spanformer.hf.attach import attach
from spanformer.hf.baselines import by_mass, uniform
from spanformer.hf.far_learner import start_states, states_in_tokens, states_off
from spanformer.hf.fit import FitConfig, budget_of, check_layers, growth_table, learn, set_windows
from spanformer.hf.fit_events import Measured, OnFitEvent, ignore
from spanformer.hf.fit_plan import FitPlan
from spanformer.hf.fits import check_windows, share_of_bytes, token_bytes
from spanformer.hf.layer_run import fit_layers
from spanformer.hf.lora import check_peft, learn_lora
from spanformer.hf.outcome import Outcome
from spanformer.hf.retrieval_fit import CODE, Allocation, allocate_retrieval, beside_retrieval, ram_tokens, rings_within
from spanformer.hf.retrieval_heads import retrieve, stop_retrieving
from spanformer.hf.saved import SPANS, save_fitted
from spanformer.hf.span_file import save_spans
from spanformer.hf.spans import head_spans
from spanformer.hf.survey import Survey, survey
from spanformer.hf.text import TextChunks, beginning, bits_per_byte, check_logits, load_model, make_chunks
from spanformer.hf.transfer import TransferConfig
from spanformer.model.budget import Budget, allocate

TRIALS = 2
"""validation texts: part of the training data, used to choose the best windows. Held-out text is only
used for the final figures."""


class FitRun:
    """A model with spans attached, and the texts it is fitted to and measured on."""

    def __init__(self, model: str, data: str, valid: str, plan: FitPlan, dtype: torch.dtype) -> None:
        self.name, self.plan = model, plan
        if plan.lora:
            check_peft()  # fail now, not after half an hour of training
        text = read_text(data)
        cut = len(text) - len(text) // 20
        other = read_text(valid) if valid else text[cut:]
        self.model, self.tokenizer = load_model(model, dtype)
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest is not None and plan.context > longest:
            raise ValueError(f"context is {plan.context}, and the model was made for {longest}; ask for fewer tokens")
        check_logits(self.model)
        self._attach(self.model)
        self.model.requires_grad_(False)
        self.layers = list(head_spans(self.model).values())
        check_layers(self.layers)
        whole = states_in_tokens(self.layers, self.model.dtype)
        self.share = share_of_bytes(self.model, plan) if plan.bytes else plan.budget
        check_windows(self.model, plan)
        replace(self.budget(self.share), states=whole)  # fail now, not after the survey
        made = {"context": plan.length, "start": plan.first}
        need = max(plan.survey, plan.steps) + TRIALS
        texts = make_chunks(text if valid else text[:cut], self.tokenizer, limit=need, **made)
        if len(texts) <= TRIALS:
            raise ValueError(
                f"the text has {len(texts)} windows of {plan.length:,} tokens, and {TRIALS} of them are only for "
                "validation; give more text or a shorter context"
            )
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(plan.seed))
        # a sink logit counts where no window hides anything, too
        counted = plan.first if plan.per == "head" else max(1, len(beginning(self.tokenizer)))
        texts = TextChunks(texts.ids[order], texts.bytes[order], counted)
        self.trials, self.train = texts[:TRIALS], texts[TRIALS:]
        self.held_out = make_chunks(other, self.tokenizer, limit=plan.measure, **made)

    def _attach(self, model: PreTrainedModel) -> PreTrainedModel:
        return attach(
            model, max_span=self.plan.length, sink_tokens=self.plan.kept_first, far_features=self.plan.features,
            sink_logits=self.plan.per == "layer",
        )  # fmt: skip

    def budget(self, share: float) -> Budget:
        return budget_of(self.layers, share, self.plan.length, self.plan.kept_first)

    @property
    def spans(self) -> int:
        return sum(p.numel() for layer in self.layers for p in layer.parameters())

    @property
    def group(self) -> int:
        """query heads of a key/value head"""
        return self.layers[0].heads // self.layers[0].groups

    def shape(self) -> Shape:
        """For a report."""
        c, layer = self.model.config, self.layers[0]
        return Shape(
            layers=len(self.layers), dim=c.hidden_size, heads=layer.heads, kv_heads=layer.groups,
            head_dim=layer.head_size // 2, feedforward=3 * c.hidden_size * getattr(c, "intermediate_size", 0),
            persistent=0, vocab=c.vocab_size, block=self.plan.length, batch=1, max_span=self.plan.length,
        )  # fmt: skip

    def survey(self, on_event: OnFitEvent) -> Survey:
        _progress(on_event, "surveying the heads", 0, 0)
        return survey(
            self.model, self.train[: self.plan.survey], sink_tokens=self.plan.sink_tokens, seed=self.plan.seed,
            rings=rings_within(self.plan.length, self.plan.sink_tokens) if self.plan.retrieve else None,
            k=self.plan.retrieve_k, layers=self.plan.per == "layer",
            on_progress=lambda done, total: _progress(on_event, "surveying the heads", done, total),
        )  # fmt: skip

    def fit(self, on_event: OnFitEvent = ignore, found: Survey | None = None) -> Outcome:
        """found: an earlier survey, to share between budgets."""
        plan, begun = self.plan, time.monotonic()
        if plan.per == "layer":
            return fit_layers(self, on_event, found)
        bits = {"full": self.measure(None, "full", on_event)}
        found = found or self.survey(on_event)
        share = self._tolerated(found, on_event) if plan.tolerance else self.share
        budget = self.budget(share)
        config, costs = self.config(), found
        if plan.features:
            budget, costs = start_states(
                self.model, self.train[: plan.survey], self.trials, budget, found, TransferConfig(), self.model.dtype,
                lambda done, total: _progress(on_event, "teaching linear states", done, total),
            )  # fmt: skip
        served = replace(budget, context=plan.context) if plan.grows else None
        made, goal, first = None, budget, allocate(costs.costs, costs.grid, budget)
        if plan.retrieve:
            made = allocate_retrieval(found, plan.retrieve, budget, code=self._code)
            goal, first = beside_retrieval(budget, made), (made.windows, made.price)
            config = replace(config, steps=0 if made.others is None else plan.steps)
        windows = learn(self.model, self.train, self.trials, goal, first, config, on_event, served)
        growth = growth_table(self.model) if plan.grows else budget.unlimited(windows)
        if plan.features or plan.retrieve:
            growth = torch.zeros_like(growth)
        fitted = "fitted spans" if made is None else "retrieval heads"
        bits[fitted] = self.measure(windows, fitted, on_event, growth, made)
        if plan.baselines:
            alone = replace(budget, states=0.0)
            others = {
                "uniform windows": uniform(len(windows), windows.shape[1], alone),
                "by attention mass": by_mass(found.lost, found.grid, alone),
            }
            with states_off(self.layers):
                bits |= {name: self.measure(other, name, on_event) for name, other in others.items()}
        if plan.lora:
            learn_lora(self.model, self.train, windows, budget, rank=plan.lora, steps=plan.lora_steps,
                       minutes=plan.minutes, lr=plan.lora_lr, on_event=on_event)  # fmt: skip
            bits[f"{fitted} and LoRA"] = self.measure(windows, "LoRA", on_event, made=made)
        set_windows(self.model, windows, growth=growth)
        maps = [layer.far for layer in self.layers if layer.far is not None]
        return Outcome(
            windows, budget.share_of(windows), bits, time.monotonic() - begun, bool(plan.lora),
            sum(len(far.kv_on()) for far in maps), sum(far.state_bytes(self.model.dtype) for far in maps),
            {} if made is None else self._retrieving(windows, made, budget), growth,
        )  # fmt: skip

    def config(self) -> FitConfig:
        plan = self.plan
        return FitConfig(steps=plan.steps, minutes=plan.minutes, lr=plan.lr,
                         ramp=max(1.0, min(96.0, plan.length / 16)),
                         last_ramp=max(1.0, min(32.0, plan.length / 32)))  # fmt: skip

    def measure(
        self, windows: Tensor | None, title: str, on_event: OnFitEvent = ignore, growth: Tensor | None = None,
        made: Allocation | None = None,
    ) -> float:  # fmt: skip
        """Bits per byte of held-out text with these windows; None: every head sees everything. made: which retrieve."""
        bits = self._bits(self.held_out, windows, title, on_event, growth, made)
        targets = self.held_out.targets * len(self.held_out)
        loss = bits * math.log(2) * float(self.held_out.bytes.sum()) / targets
        if title in ("full", "fitted spans", "retrieval heads", "LoRA"):
            on_event(Measured(bits, loss, targets))
        return bits

    def _bits(
        self, texts: TextChunks, windows: Tensor | None, title: str, on_event: OnFitEvent, growth: Tensor | None = None,
        made: Allocation | None = None,
    ) -> float:  # fmt: skip
        if windows is None:
            windows = self.budget(1.0).longest.expand(len(self.layers), self.layers[0].groups)
        _progress(on_event, f"measuring: {title}", 0, len(texts))
        set_windows(self.model, windows, growth=growth)
        if made is not None:
            retrieve(self.model, share=made.share, ring=made.ring, k=self.plan.retrieve_k)
        try:
            return bits_per_byte(
                self.model, texts, lambda done, total: _progress(on_event, f"measuring: {title}", done, total)
            )
        finally:
            if made is not None:
                stop_retrieving(self.model)

    @property
    def _code(self) -> float:
        """RAM of a stored token, over the 8-bit key and value of a token"""
        return CODE if self.plan.retrieve_codes == "ram" else 0.0

    def _retrieving(self, windows: Tensor, made: Allocation, budget: Budget) -> dict[str, float]:
        tokens = ram_tokens(windows, made, budget, code=self._code)
        each = torch.tensor(token_bytes(self.layers, 8)) / self.layers[0].groups
        stored = made.chosen.sum(1) * torch.tensor([s.head_size * self.model.dtype.itemsize for s in self.layers])
        return {
            "share": made.share,
            "heads": int(made.chosen.sum()),
            "ring": made.ring,
            "k": self.plan.retrieve_k,
            "ram": float(tokens.sum() / budget.full.expand_as(windows).sum()),
            "ram_bytes": round(float((tokens.sum(1) * each).sum())),
            "stored_bytes": int(stored.sum()) * (budget.context - budget.sink_tokens),
        }

    def _tolerated(self, found: Survey, on_event: OnFitEvent) -> float:
        """The smallest share at which the survey's windows raise the loss on the validation texts by no
        more than the tolerance."""
        full = self._bits(self.trials, None, "full, on texts kept aside", on_event)
        low, high = self.budget(1.0).least + 1 / self.plan.length, 1.0
        for _ in range(6):
            share = math.sqrt(low * high)
            budget = self.budget(share)
            windows = budget.whole(allocate(found.costs, found.grid, budget)[0])
            rise = self._bits(self.trials, windows, f"a share of {share:.3f}", on_event) / full - 1
            on_event(NoteEvent(0, f"{share:.3f} of the memory raises the loss by {100 * rise:.2f} %"))
            low, high = (low, share) if rise <= self.plan.tolerance else (share, high)
        return high

    def save(self, out: Path, outcome: Outcome) -> None:
        """The model with its spans, as transformers saves it, and the figures. Weights are those of the original files,
        not rounded by fitting, unless LoRA changed them."""
        model = self.model
        if not outcome.adapted:
            model = self._attach(load_model(self.name, "auto")[0])
            for fitted, saved in zip(self.layers, head_spans(model).values(), strict=True):
                if fitted.far is not None and saved.far is not None:
                    saved.far.load_state_dict(fitted.far.state_dict())
                if fitted.sink_logits is not None and saved.sink_logits is not None:
                    saved.sink_logits.data.copy_(fitted.sink_logits)
        set_windows(model, outcome.windows, growth=outcome.growth)
        figures = {
            "context": self.plan.length, "sink_tokens": self.plan.kept_first, "share": outcome.share,
            "bits_per_byte": outcome.bits, "minutes": round(outcome.seconds / 60, 2),
            "windows": outcome.windows.tolist(), "served": self.plan.context,
        }  # fmt: skip
        if outcome.growth is not None:
            figures["growth"] = outcome.growth.tolist()
        if outcome.form:
            figures |= {"form": outcome.form, "bits_per_byte_of_beginnings": outcome.early}
        if self.plan.features:
            figures |= {"state_bytes": outcome.state_bytes, "states": [
                [] if layer.far is None else layer.far.kv_on() for layer in self.layers
            ]}  # fmt: skip
        if self.plan.retrieve:
            figures["retrieve"] = outcome.retrieving | {"codes": self.plan.retrieve_codes}
        if not outcome.adapted:
            save_spans(model, out / SPANS, figures)
        save_fitted(model, self.tokenizer, out, figures)


def _progress(on_event: OnFitEvent, title: str, done: int, total: int) -> None:
    on_event(ProgressEvent(title, done, total))
