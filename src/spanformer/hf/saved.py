"""A fitted model on disk: the folder that `save_pretrained` writes, with its spans, and the figures in `spans.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from spanformer.core.files import hidden_folder, put_file, write_text
from spanformer.hf.attach import CONFIG
from spanformer.hf.pretrained import check_tokenizer, load_tokenizer
from spanformer.hf.saving import from_pretrained
from spanformer.hf.text import load_model

FILE = "spans.json"
"""windows by layer and key/value head, and what was measured with them"""
SPANS = "spans"
"""a folder with the spans alone, for `load_spans`"""


def save_fitted(model: PreTrainedModel, tokenizer: Any, out: Path, figures: dict) -> None:
    """The model with its spans, its tokenizer and the figures, in one folder. config.json is written last: a folder
    without it is not a model, so a process killed while saving leaves nothing that looks complete."""
    try:
        with hidden_folder(out / "model") as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            write_text(new / FILE, json.dumps(figures, indent=1) + "\n")
            for file in sorted(new.iterdir(), key=lambda each: each.name == CONFIG_NAME):
                put_file(file, out / file.name)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"the model could not be saved in {out} ({why}); make room, and fit into another --out"
        ) from error


def load_fitted(name: str, dtype: torch.dtype | str = "auto") -> tuple[PreTrainedModel, Any, bool]:
    """(model, tokenizer, whether it has spans) of anything that `load_model` takes, or of a folder with spans."""
    if not _has_spans(Path(name) / "config.json"):
        return *load_model(name, dtype), False
    model, tokenizer = from_pretrained(name, dtype=dtype).requires_grad_(False).eval(), load_tokenizer(name)
    check_tokenizer(tokenizer, model, name)
    return model, tokenizer, True


def fitted_retrieval(name: str | Path) -> dict[str, Any]:
    """The arguments of `hf.retrieve` with which `fit-spans --retrieve` measured a folder's model; empty if its heads do
    not retrieve."""
    file = Path(name) / FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes()).get("retrieve", {})
        return {"share": float(found["share"]), "ring": int(found["ring"]), "k": int(found["k"])} if found else {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'"retrieve" in {file} is not what fit-spans writes; expected share, ring and k, all numbers: fit the '
            "model again, or pass them to hf.retrieve yourself"
        ) from error


def _has_spans(config: Path) -> bool:
    if not config.is_file():
        return False
    try:
        found = json.loads(config.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{config} is not a JSON object; expected a model's configuration")
    return CONFIG in found
