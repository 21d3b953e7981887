"""Spans in transformers' Trainer: the span penalty, clamping, and figures about spans in every log."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spanformer.hf.spans import clamp_spans, head_spans, mean_keeps, span_penalty


class SpanCallback(TrainerCallback):
    """Trainer(..., callbacks=[SpanCallback(penalty=2e-6)])

    A callback cannot change the loss, but the penalty's gradient does not depend on the data: it is added just before
    each optimiser step, after the gradients were clipped. The logged loss has no penalty; logs also have
    `spans_mean`, the tokens a key/value head keeps on average (sinks included), and `spans_penalty`.
    """

    def __init__(self, penalty: float) -> None:
        if not 0 <= penalty < math.inf:
            raise ValueError(f"penalty is {penalty}; expected at least 0 (a negative penalty would reward long spans)")
        self.penalty = penalty

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_others: Any
    ) -> None:
        layers = head_spans(model)
        frozen = [name for name, spans in layers.items() if not spans.ratio.requires_grad]
        if frozen:
            raise ValueError(
                f"{frozen[0]}.spans.ratio does not require a gradient ({len(frozen)} of {len(layers)} layers): with "
                "PEFT give its configuration modules_to_save=['spans']"
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_others: Any
    ) -> None:
        if self.penalty:
            span_penalty(model, self.penalty).backward()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_others: Any
    ) -> None:
        clamp_spans(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        logs: dict[str, float] | None = None,
        **_others: Any,
    ) -> None:
        layers = list(head_spans(model).values())
        found = {
            "spans_mean": mean_keeps(layers),
            "spans_penalty": span_penalty(model, self.penalty).item(),
        }
        for record in (logs, state.log_history[-1] if state.log_history else None):
            if record is not None:
                record.update(found)
