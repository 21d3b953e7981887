"""Load a model with spans from the folder that `save_pretrained` wrote.

The folder is an ordinary Hugging Face folder: safetensors with `….spans.ratio` among the weights, and `….spans.far.…`
if heads have linear states; config.json says under "spanformer" how the spans are attached. Nothing in it is executed.
config.json also names "spanformer" as the attention implementation, so that AutoModelForCausalLM cannot lose the spans
silently: it refuses to load or, where spanformer.hf is imported, the first forward pass says that spans are missing.
attn_implementation="sdpa" loads the model without spans on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from spanformer.hf.attach import CONFIG, attach, detach, forget_spans
from spanformer.hf.far import FarMap
from spanformer.hf.pretrained import load_causal_lm, load_config
from spanformer.hf.spans import NAME, HeadSpans, head_spans

_KEYS = {"max_span": int, "ramp": float, "per": str, "sink_tokens": int}
_MORE = {"far_features": int, "sink_logits": bool}
_TAIL = f".{NAME}.ratio"
OURS = re.compile(rf"\.{NAME}\.(ratio|growth|sink_logits|far\.[a-z_]+)$")


def from_pretrained(folder: str | Path, *, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model that `save_pretrained` left in a folder, with its spans attached. dtype: of the model's weights;
    default: that of the file; ratios keep the dtype in which they were saved."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; expected a folder that save_pretrained wrote")
    config = load_config(folder)
    settings = getattr(config, CONFIG, None)
    if settings is None:
        raise ValueError(
            f'{folder} holds no spans (config.json has no "{CONFIG}"); load it with AutoModelForCausalLM, then attach'
        )
    check_settings(settings, str(folder / "config.json"))
    if type(config) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{folder} holds a model of type {config.model_type!r}, which is not a causal language model")
    forget_spans(config)
    tensors = read_tensors(folder)
    with _tensors_expected(config):
        model = load_causal_lm(folder, config=config, dtype=dtype)
    return attach_saved(model, settings, tensors, folder)


def attach_saved(
    model: PreTrainedModel, settings: dict[str, Any], tensors: dict[str, Tensor], folder: Path
) -> PreTrainedModel:
    """Attach spans and give them these saved tensors. folder: where they come from, for messages."""
    _check_features(settings.get("far_features", 0), tensors, folder)
    ratios = {name.removesuffix(_TAIL): t for name, t in tensors.items() if name.endswith(_TAIL)}
    attach(model, **settings)
    try:
        _fill(model, ratios, tensors, folder)
    except ValueError:
        detach(model)
        raise
    return model


def _fill(model: PreTrainedModel, ratios: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path) -> None:
    layers = head_spans(model)
    if set(layers) != set(ratios):
        odd = sorted(set(layers) ^ set(ratios))
        raise ValueError(f"the spans in {folder} do not fit its model: {odd[0]} has spans in only one of the two")
    for name, spans in layers.items():
        fill_layer(spans, name, tensors, folder)


def fill_layer(spans: HeadSpans, name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Give the spans of the attention module of this name their saved tensors."""
    ratio = tensors[name + _TAIL]
    if ratio.shape != spans.ratio.shape or not bool(((ratio >= 0) & (ratio <= 1)).all()):
        raise ValueError(
            f"{name}{_TAIL} in {folder} has shape {list(ratio.shape)}; expected {list(spans.ratio.shape)} ratios "
            "from 0 to 1"
        )
    with torch.no_grad():
        spans.ratio.copy_(ratio)
        spans.growth.copy_(_growth(spans, tensors.get(f"{name}.{NAME}.growth"), name, folder))
    if spans.sink_logits is not None:
        held = tensors.get(f"{name}.{NAME}.sink_logits")
        if held is None or held.shape != spans.sink_logits.shape or not bool(held.isfinite().all()):
            raise ValueError(
                f"{name}.{NAME}.sink_logits in {folder} are {'missing' if held is None else list(held.shape)}; "
                f"expected {list(spans.sink_logits.shape)} finite numbers"
            )
        with torch.no_grad():
            spans.sink_logits.copy_(held)
    if spans.far is not None:
        _load_far(spans.far, f"{name}.{NAME}.far.", tensors, folder)


def _growth(spans: HeadSpans, held: Tensor | None, name: str, folder: Path) -> Tensor:
    """Zeros if spans were saved before they could grow."""
    if held is None:
        return torch.zeros_like(spans.growth)
    fixed = spans.window is not None or spans.far is not None
    if held.shape != spans.growth.shape or not bool(((held >= 0) & (held <= (0 if fixed else 1))).all()):
        raise ValueError(
            f"{name}.{NAME}.growth in {folder} has shape {list(held.shape)}; expected {list(spans.growth.shape)} "
            f"numbers from 0 to {0 if fixed else 1}"
        )
    return held


def _check_features(features: int, tensors: dict[str, Tensor], folder: Path) -> None:
    """Refuse a number of features that the file does not hold, before memory is allocated for it."""
    held = {t.shape[1] if t.ndim == 3 else -1 for name, t in tensors.items() if name.endswith(".far.key_weight")}
    if held != ({features} if features else set()):
        raise ValueError(
            f'"far_features" in {folder} is {features}, and the weights hold linear states of '
            f"{sorted(held) or 'no'} features; one of the two is damaged"
        )


def _load_far(far: FarMap, begin: str, tensors: dict[str, Tensor], folder: Path) -> None:
    for name, own in far.state_dict().items():
        held = tensors.get(begin + name)
        fits = held is not None and held.shape == own.shape and (held.dtype == own.dtype or held.is_floating_point())
        if not fits or held is None or not bool(held.isfinite().all()):
            shape = "missing" if held is None else f"{list(held.shape)} of {held.dtype}"
            raise ValueError(
                f"{begin}{name} in {folder} is {shape}; expected finite numbers {list(own.shape)} of {own.dtype}"
            )
        own.copy_(held)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The ratios and features in a folder's safetensors files, by name."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} does not name the files of the weights; the file is damaged") from error
    found: dict[str, Tensor] = {}
    for name in names:
        path = folder / Path(name).name
        if not path.is_file():
            raise ValueError(f"{folder} has no {path.name}; spans are read from safetensors files")
        found |= read_file(path)[0]
    return found


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The ratios and features in one safetensors file, by name, and the file's metadata."""
    try:
        with safe_open(path, "pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys() if OURS.search(key)}  # noqa: SIM118
            return found, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); the file is damaged") from error


def check_settings(settings: object, where: str) -> None:
    """Refuse settings of `attach` that `attach` did not write."""
    kinds = _KEYS | {key: kind for key, kind in _MORE.items() if isinstance(settings, dict) and key in settings}
    fits = isinstance(settings, dict) and set(settings) == set(kinds)
    if not fits or not all(type(settings[key]) is kind for key, kind in kinds.items()):  # type: ignore[index]
        raise ValueError(f'"{CONFIG}" in {where} is {settings}; expected {", ".join(_KEYS)}')


@contextmanager
def _tensors_expected(config: object) -> Iterator[None]:
    """While the model is loaded, its class does not report our tensors as unexpected keys: this module reads them."""
    kind = AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[index]
    attribute = "_keys_to_ignore_on_load_unexpected"
    own, before = attribute in vars(kind), getattr(kind, attribute, None)
    setattr(kind, attribute, [*(before or []), OURS.pattern])
    try:
        yield
    finally:
        setattr(kind, attribute, before) if own else delattr(kind, attribute)
