"""Exits of a pretrained model: the layers after which a token may leave, and for each a linear map and a classifier.

Jump to Conclusions: Short-Cutting Transformers With Linear Transformations (Din et al., 2023),
https://arxiv.org/abs/2303.09435

    logits_n = W (A_n z + a_n)        z = norm(x^n); A_n, a_n by least squares from the last layer's norm(x^L)
    c_n = σ(w_n · z + b_n)            trained to tell whether logits_n already have the last layer's best token

A pretrained model was not trained to be read early: SmolLM2-135M's layer 25 of 30 has the last layer's best token for
4 of 10 tokens as it is, and for 7 of 10 through the map. The trunk stays as it is. A check costs E products, an exit E²
more, while softmax response pays the output layer: in SmolLM2-135M, whose vocabulary has 49,152 tokens, as much as 8
layers. Greedy text only: the calibration says nothing about sampled text.

Shapes: B rows, E width, X exits, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spanformer.core.files import replace_file
from spanformer.depth.confidence import Confidence, saturation, softmax_response
from spanformer.hf.exit_layers import ExitLayers
from spanformer.infer.exits import Calibration
from spanformer.memory.cache import digest_tensors

FILE = "exits.safetensors"
FORMAT = 1
TENSORS = ("weight", "bias", "maps")


@dataclass(frozen=True, eq=False)
class ExitHeads:
    layers: tuple[int, ...]
    """the layers, counted from 1, after which a token may leave"""
    weight: Tensor
    """[X, E]: w"""
    bias: Tensor
    """[X]: b"""
    maps: Tensor
    """[X, E + 1, E]: A, and a as the last row"""
    weights: str
    """the fingerprint of the model that they were trained for"""
    text: str
    """the SHA-256 of the text that trained them"""
    calibration: Calibration | None = None

    def mapped(self, exit: int, normed: Tensor) -> Tensor:
        """What the output layer reads of states after the last norm [..., E] at an exit."""
        return torch.addmm(self.maps[exit, -1], normed, self.maps[exit, :-1])

    def score(self, exit: int, normed: Tensor) -> Tensor:
        """The logit of c at an exit, counted from 0, of states after the last norm [..., E]."""
        return normed @ self.weight[exit] + self.bias[exit]


class Leaving:
    """Who leaves after a layer; see `Leaves`. Softmax response keeps the logits of those who leave, which the text
    needs."""

    def __init__(self, decoder: ExitLayers, heads: ExitHeads, confidence: Confidence) -> None:
        if confidence.decay:
            raise ValueError(f"decay is {confidence.decay}; expected 0 for a model of Hugging Face")
        self.decoder, self.heads, self.confidence = decoder, heads, confidence
        self.exit_at = {n: exit for exit, n in enumerate(heads.layers)}
        self.known: Tensor | None = None
        """[B, V] logits of the last check, if all rows left by it"""

    def __call__(self, n: int, x: Tensor, before: Tensor) -> Tensor | None:
        if n not in self.exit_at or math.isinf(self.confidence.threshold):
            return None
        exit, logits = self.exit_at[n], None
        if self.confidence.measure == "saturation":
            sure = saturation(x, before)
        elif self.confidence.measure == "softmax":
            logits = self.decoder.output(self.heads.mapped(exit, self.decoder.trunk.norm(x)))
            sure = softmax_response(logits)
        else:
            sure = self.heads.score(exit, self.decoder.trunk.norm(x)).sigmoid()
        leaving = sure >= self.confidence.threshold
        self.known = logits if bool(leaving.all()) else None
        return leaving

    def logits(self, x: Tensor, layers: Tensor) -> Tensor:
        """[B, V] of the states x [B, E] that tokens left with after these layers [B]."""
        known, self.known = self.known, None
        if known is not None:
            return known
        normed = self.decoder.trunk.norm(x)
        for n, exit in self.exit_at.items():
            rows = (layers == n).nonzero()[:, 0].to(x.device)
            if len(rows):
                normed = normed.index_copy(0, rows, self.heads.mapped(exit, normed[rows]))
        return self.decoder.output(normed)


class Token(NamedTuple):
    ids: Tensor
    """[B] the next token of each row"""
    layers: Tensor | None
    """[B] the layers that the token before it ran through; None for the prompt, which runs through all"""


def write(decoder: ExitLayers, leaving: Leaving, ids: Tensor, most: int) -> Iterator[Token]:
    """Continue ids [B, T] greedily by `most` tokens."""
    cache = decoder.cache(ids.shape[1] + most)
    x, layers, leaving.known = decoder.read(ids, cache)[:, -1], None, None
    whole = torch.full((len(ids),), decoder.count)
    for n in range(most):
        token = leaving.logits(x, whole if layers is None else layers).argmax(-1)
        yield Token(token, layers)
        if n + 1 < most:
            x, layers = decoder.step(token, cache, leaving)


def continuations(
    decoder: ExitLayers, heads: ExitHeads, prompts: Tensor, most: int, confidence: Confidence,
    on_progress: Callable[[int, int], None] = lambda done, total: None, *, end: int | None = None, batch: int = 16,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Greedy continuations of prompts [N, T], each until the token `end`, and the mean layers of their tokens."""
    texts: list[list[int]] = []
    layers = tokens = 0
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        found = list(write(decoder, Leaving(decoder, heads, confidence), some, most))
        made = torch.stack([each.ids for each in found], 1)
        taken = torch.stack([each.layers for each in found if each.layers is not None], 1) if most > 1 else made[:, :0]
        for row, depth in zip(made.tolist(), taken, strict=True):
            length = row.index(end) if end in row else most
            texts.append(row[:length])
            layers, tokens = layers + int(depth[:length].sum()), tokens + len(depth[:length])
        on_progress(len(texts), len(prompts))
    return texts, layers / tokens if tokens else math.nan


def fingerprint(decoder: ExitLayers) -> str:
    """The SHA-256 of the model's own weights, without spans."""
    own = {name: t for name, t in decoder.model.state_dict().items() if ".spans." not in name}
    return digest_tensors("", own)


def save(heads: ExitHeads, path: Path) -> Path:
    """Write them into one small file."""
    about = {
        "kind": "spanformer exits", "format": FORMAT, "layers": heads.layers, "weights": heads.weights,
        "text": heads.text, "calibration": None if heads.calibration is None else asdict(heads.calibration),
    }  # fmt: skip
    try:
        with replace_file(path) as new:
            save_file({name: getattr(heads, name) for name in TENSORS}, new, {"spanformer": json.dumps(about)})
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(f"{path} could not be saved ({why}); choose another --out") from error
    return path


def load(path: Path, decoder: ExitLayers, weights: str) -> ExitHeads:
    """The exits in a file, which must be of these weights."""
    if not path.is_file():
        raise ValueError(f"there are no exits in {path}; run spanformer calibrate-exits with this model first")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("spanformer", "{}"))
            weight, bias, maps = (file.get_tensor(name) for name in TENSORS)
        if about.get("kind") != "spanformer exits" or about.get("format") != FORMAT:
            raise ValueError("it is no file of exits of this version")
        calibration = about["calibration"]
        found = ExitHeads(
            tuple(int(n) for n in about["layers"]), weight, bias, maps, str(about["weights"]), str(about["text"]),
            None if calibration is None else Calibration(**calibration),
        )  # fmt: skip
        if found.calibration is not None:
            found.calibration.confidence()
        _check_shapes(found, decoder.width)
        check_layers(found.layers, decoder.count)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); run spanformer calibrate-exits again") from error
    if found.weights != weights:
        raise ValueError(f"{path} was made for other weights; run spanformer calibrate-exits again")
    return found


def _check_shapes(heads: ExitHeads, width: int) -> None:
    exits = len(heads.layers)
    for name, shape in zip(TENSORS, ((exits, width), (exits,), (exits, width + 1, width)), strict=True):
        held: Tensor = getattr(heads, name)
        if held.shape != shape or held.dtype != torch.float32 or not bool(held.isfinite().all()):
            raise ValueError(f"its {name} is {list(held.shape)} of {held.dtype}; expected finite numbers {list(shape)}")


def no_heads(width: int, *layers: int) -> ExitHeads:
    """Exits that were not trained: their maps change nothing, and their classifiers are never sure or unsure."""
    same = torch.cat([torch.eye(width), torch.zeros(1, width)])
    n = len(layers)
    return ExitHeads(layers, torch.zeros(n, width), torch.zeros(n), same.expand(n, -1, -1).clone(), "", "")


def check_layers(layers: tuple[int, ...], count: int) -> None:
    """Refuse exits that a model of `count` layers does not have."""
    if not layers or sorted(set(layers)) != list(layers) or not (layers[0] >= 1 and layers[-1] < count):
        raise ValueError(
            f"the exits are after layers {list(layers)}; expected rising numbers from 1 to {count - 1}, since layer "
            f"{count} is the last"
        )


def calibrated(heads: ExitHeads, calibration: Calibration) -> ExitHeads:
    return replace(heads, calibration=calibration)
