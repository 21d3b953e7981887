"""A fitted model on disk: the model as Hugging Face saves it, and its windows in `spans.json` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanformer.hf.attach import attach, detach
from spanformer.hf.controller import Budget
from spanformer.hf.fit import set_windows
from spanformer.hf.text import load_model

FILE = "spans.json"


def save_windows(out: Path, model: str, windows: Tensor, budget: Budget, figures: dict) -> Path:
    """windows [L, Hkv], sinks aside; model: where the weights are, "" for this folder."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "format": 1, "model": model, "context": budget.context, "sinks": budget.sinks,
        "share": budget.share_of(windows), "windows": windows.tolist(), **figures,
    }  # fmt: skip
    path = out / FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def read_windows(folder: Path) -> dict:
    try:
        content = json.loads((folder / FILE).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / FILE} is no JSON ({error}); expected what fit-spans wrote") from None
    if content.get("format") != 1 or not isinstance(content.get("windows"), list):
        raise ValueError(f"{folder / FILE} does not hold windows; expected what fit-spans wrote")
    return content


def load_fitted(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Any, bool]:
    """(model, tokenizer, whether it has fitted spans) of a model's name or of a folder that fit-spans wrote."""
    folder = Path(name)
    if not (folder / FILE).is_file():
        return *load_model(name, dtype), False
    content = read_windows(folder)
    model, tokenizer = load_model(content["model"] or name, dtype)
    windows = torch.tensor(content["windows"])
    attach(model, max_span=content["context"], sinks=content["sinks"])
    set_windows(model, windows)
    return model, tokenizer, True


def save_weights(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """The weights without spans, for a model whose weights changed (LoRA). The model has no spans afterwards."""
    detach(model).save_pretrained(out)
    tokenizer.save_pretrained(out)
