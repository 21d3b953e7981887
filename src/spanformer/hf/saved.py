"""A fitted model on disk: the folder that `save_pretrained` writes, with its spans, and the figures in `spans.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from spanformer.core.files import write_text
from spanformer.hf.attach import CONFIG
from spanformer.hf.saving import from_pretrained
from spanformer.hf.text import load_model

FILE = "spans.json"
"""windows by layer and key/value head, and what was measured with them"""


def save_fitted(model: PreTrainedModel, tokenizer: Any, out: Path, figures: dict) -> None:
    """The model with its spans, its tokenizer and the figures, in one folder."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_text(out / FILE, json.dumps(figures, indent=1) + "\n")


def load_fitted(name: str, dtype: torch.dtype | str = "auto") -> tuple[PreTrainedModel, Any, bool]:
    """(model, tokenizer, whether it has spans) of whatever `load_model` takes, or of a folder with spans."""
    config = Path(name) / "config.json"
    if not config.is_file() or CONFIG not in json.loads(config.read_bytes()):
        return *load_model(name, dtype), False
    return from_pretrained(name, dtype=dtype).requires_grad_(False).eval(), AutoTokenizer.from_pretrained(name), True
