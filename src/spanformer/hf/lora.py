"""Low-rank updates (LoRA, https://arxiv.org/abs/2106.09685) that adapt a model to its windows.

They have the same target as the spans: the full model's predictions, not the next tokens of the text. So they only
recover what the windows lost; adapting to the text would move the model away from its teacher.
"""

from __future__ import annotations

import importlib.util
import time

import torch
from torch import nn
from transformers import PreTrainedModel

from spanformer.core.events import ProgressEvent
from spanformer.hf.fit import backward_kl, full_states, set_windows
from spanformer.hf.fit_events import LoraStep, OnFitEvent, ignore
from spanformer.hf.text import TextChunks, hidden_states
from spanformer.model.budget import Budget


def learn_lora(
    model: PreTrainedModel,
    texts: TextChunks,
    windows: torch.Tensor,
    budget: Budget,
    *,
    rank: int,
    steps: int,
    minutes: float = 0.0,
    lr: float = 1e-3,
    on_event: OnFitEvent = ignore,
) -> None:
    """Learn updates of the given rank to every linear layer in the blocks, with fixed windows, and merge them into the
    weights, which become float32."""
    check_peft()
    from peft import LoraConfig, get_peft_model

    if rank < 1 or steps < 1 or not lr > 0:
        raise ValueError(f"lora is {rank}, its steps {steps}, its lr {lr:g}; expected at least 1, and a positive lr")
    begun = time.monotonic()
    teacher = []
    for number, row in enumerate(texts.ids[:steps]):
        on_event(ProgressEvent("reading with the full model", number, min(steps, len(texts))))
        teacher.append(full_states(model, row, texts.start, budget.context))
    set_windows(model, windows)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    inner = adapted.get_base_model()
    learned = [p for name, p in adapted.named_parameters() if "lora_" in name]
    for p in adapted.parameters():
        p.requires_grad_(False)
    for p in learned:
        p.data = p.data.float()
        p.requires_grad_(True)
    adam = torch.optim.AdamW(learned, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            group["lr"] = lr * min(1.0, step / 8) * (1 - (step - 1) / steps)
        number = (step - 1) % len(teacher)
        states = hidden_states(inner, texts.ids[number][None], texts.start)[0]  # type: ignore[arg-type]
        loss = backward_kl(inner, states, teacher[number])  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(learned, 1.0)
        adam.step()
        adam.zero_grad()
        seconds = time.monotonic() - begun
        on_event(LoraStep(step, loss))
        if minutes and seconds > 60 * minutes:
            break
    adapted.float()  # an update of a few thousandths of a weight would be lost in bfloat16
    adapted.merge_and_unload()


def check_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ImportError("LoRA needs peft, which is missing: pip install peft; or leave out --lora")
