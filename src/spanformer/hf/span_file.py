"""Spans as a small folder of their own, without the model's weights.

    hf.save_spans(model, "spans")               spans.safetensors and README.md, a model card
    hf.load_spans(model, "spans")               attach them to the same model, loaded anew
    hf.load_spans(model, "preset:NAME")         spans that come with this package (presets.py)

The file holds a fingerprint of the model: `PER_MATRIX` weights of each matrix of its attention layers, in units of the
matrix's own size. Spans of another model are refused; quantised or fine-tuned weights of the same model still fit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.core.files import replace_file, write_text
from spanformer.hf.attach import CONFIG, base_of, probe
from spanformer.hf.card import CARD, write_card
from spanformer.hf.presets import span_folder
from spanformer.hf.saving import OURS, attach_saved, check_settings, fill_layer, read_file
from spanformer.hf.spans import NAME, HeadSpans, head_spans

FILE = "spans.safetensors"
PER_MATRIX = 16
LEAST_LIKENESS = 0.8
"""correlation of two fingerprints: 4-bit weights have 0.99 and more, another model's about 0"""


def save_spans(model: nn.Module, path: str | Path, figures: dict[str, Any] | None = None) -> None:
    """Write the model's spans and a model card in the folder `path`. figures: what `fit-spans` measured (spans.json),
    for the card."""
    base, folder = base_of(model), Path(path)
    layers = head_spans(base)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give a folder for {FILE} and its model card")
    settings = getattr(base.config, CONFIG)
    about = {"model_type": base.config.model_type, "settings": settings}
    tensors = {name: t.detach().cpu().contiguous() for name, t in base.state_dict().items() if OURS.search(name)}
    tensors["fingerprint"] = fingerprint(base, list(layers))
    folder.mkdir(parents=True, exist_ok=True)
    with replace_file(folder / FILE) as new:
        save_file(tensors, new, {"format": "pt", CONFIG: json.dumps(about)})
    write_text(folder / CARD, write_card(base, layers, figures or {}))


def load_spans(model: nn.Module, path: str | Path) -> PreTrainedModel:
    """Attach the spans that `save_spans` or `fit-spans` wrote in a folder, or a preset's, to this model, and return
    it."""
    base, folder = base_of(model), span_folder(path)
    file = folder / FILE if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"{path} has no {FILE}; expected a folder that save_spans or fit-spans wrote")
    tensors, metadata = read_file(file)
    about = _about(metadata, file)
    if about["model_type"] != base.config.model_type:
        raise ValueError(
            f"{file} holds spans of a model of type {about['model_type']!r}, and this one is a "
            f"{base.config.model_type!r}; load the model that they were learned for"
        )
    if not hasattr(base.config, CONFIG):  # else attach says that it has spans already
        check_likeness(_held_fingerprint(file), fingerprint(base, list(probe(base))), file)
    attach_saved(base, about["settings"], tensors, file)
    return model  # type: ignore[return-value]


def fingerprint(model: PreTrainedModel, names: list[str]) -> Tensor:
    """[n] some weights of each matrix in these attention modules, each matrix's divided by their root mean square."""
    parts = []
    for name in names:
        for own, weight in model.get_submodule(name).named_parameters():
            if weight.ndim == 2 and not own.startswith(f"{NAME}."):
                parts.append(sampled(weight.detach()))
    return torch.cat(parts)


def sampled(weight: Tensor) -> Tensor:
    """[PER_MATRIX] weights of a matrix, divided by their root mean square."""
    at = torch.linspace(0, weight.numel() - 1, PER_MATRIX, device=weight.device, dtype=torch.float64).round().long()
    some = weight.reshape(-1)[at].float().cpu()
    return some / some.square().mean().sqrt().clamp(min=1e-12)


def read_layers(path: str | Path, heads: int, kv_heads: int) -> tuple[list[HeadSpans], Tensor]:
    """The spans of each layer, without their model, and its fingerprint. path: a folder of fit-spans or save_spans, or
    a preset; heads, kv_heads: of a layer."""
    path = span_folder(path)
    places = [path / "spans" / FILE, path / FILE, path]
    file = next((each for each in places if each.is_file()), None)
    if file is None:
        raise ValueError(f"{path} has no {FILE}; expected a folder that fit-spans or save_spans wrote")
    tensors, metadata = read_file(file)
    settings = _about(metadata, file)["settings"]
    if settings.get("far_features"):
        raise ValueError(f"{file} has linear states, which no other engine computes; fit without them (--far none)")
    names = sorted(
        {name.rpartition(f".{NAME}.")[0] for name in tensors if name.endswith(".ratio")},
        key=lambda name: [int(part) for part in re.findall(r"\d+", name)],
    )
    layers = []
    for name in names:
        layers.append(HeadSpans(
            heads, kv_heads, settings["max_span"], ramp=settings["ramp"], init=1.0, per=settings["per"],
            sink_tokens=settings["sink_tokens"], sink_logits=settings.get("sink_logits", False),
        ))  # fmt: skip
        fill_layer(layers[-1], name, tensors, file)
    if not layers:
        raise ValueError(f"{file} holds no spans; expected a file that fit-spans or save_spans wrote")
    return layers, _held_fingerprint(file)


def check_likeness(held: Tensor, own: Tensor, file: str | Path) -> None:
    alike = 0.0
    if held.shape == own.shape:
        alike = float(nn.functional.cosine_similarity(held, own, dim=0))
    if not alike >= LEAST_LIKENESS:  # NaN, too
        raise ValueError(
            f"the spans in {file} were learned for another model: sampled attention weights correlate by {alike:.2f}, "
            f"expected {LEAST_LIKENESS} or more; load the model that they were learned for"
        )


def _held_fingerprint(file: Path) -> Tensor:
    with safe_open(file, "pt") as opened:
        if "fingerprint" not in opened.keys():  # noqa: SIM118
            raise ValueError(f"{file} holds no fingerprint of its model; expected a file that save_spans wrote")
        return opened.get_tensor("fingerprint").float()


def _about(metadata: dict[str, str], file: Path) -> dict[str, Any]:
    try:
        about = json.loads(metadata[CONFIG])
        if set(about) != {"model_type", "settings"}:
            raise ValueError
    except (KeyError, ValueError, TypeError, RecursionError):
        raise ValueError(f"{file} is not a file of spans; expected one that save_spans or fit-spans wrote") from None
    check_settings(about["settings"], str(file))
    return about
