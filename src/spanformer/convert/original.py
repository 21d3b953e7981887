"""Converts checkpoints of the adaptive-span paper's code (facebookresearch/adaptive-span) into spanformer models.

    theirs                                                          ours
    in_emb.weight, out_emb.{weight,bias}                            embedding.weight, head.{weight,bias}
    key_pe [1, D, S], the farthest distance first                   position.weight [S, D], the nearest first
    layers.N.attn.proj_{query,key,val,out}.weight                   blocks.N.attention.{query,key,value,out}.weight
    layers.N.attn.attn.adaptive_span._mask.current_val [H, 1, 1]    blocks.N.attention.mechanism.ratio [H]
    layers.N.attn.attn.persistent_memory.key [H, D, N]              blocks.N.attention.persistent.key [H, N, D]
    layers.N.attn.attn.persistent_memory.val [H, N, D]              blocks.N.attention.persistent.value [H, N, D]
    layers.N.{norm1,norm2}, layers.N.ff.{fc1,fc2}                   blocks.N.{norm1,norm2}, ….feedforward.{up,down}
    in_emb.emb_layers.I.weight, in_emb.emb_projs.I                  embedding.clusters.{weights,projections}.I
    out_emb.out_layers.I.{weight,bias}, out_emb.out_projs.I         head.{clusters.weights,biases}.I, ….projections.I
    out_emb.cluster_proj.{weight,bias}                              head.tails.{weight,bias}

A checkpoint is untrusted: nothing in it is executed, and a mismatch raises one sentence.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from spanformer.convert.original_settings import Settings
from spanformer.core.fields import as_dict
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.folder import write_folder
from spanformer.model.lm import LM
from spanformer.model.weights import misfit, shapes

PREFIX = "module."  # prefix that torch's data-parallel wrappers add to every name
SPAN = "attn.attn.adaptive_span._mask."
PERSISTENT = "attn.attn.persistent_memory."
TWIN = "persistent_memory.adaptive_span"  # the same module a second time, under the persistent memory that it masks
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def import_original(
    checkpoint: Path,
    out: Path,
    settings: Settings | None = None,
    vocabulary: Callable[[ModelConfig], dict] | None = None,
) -> str:
    """Convert a checkpoint to the model folder `out`, for `spanformer.load`. Returns a summary in one line.

    vocabulary: returns the vocabulary of a model as `Vocab.to_json` does; None: the folder has no vocabulary.
    """
    saved = read_checkpoint(checkpoint)
    try:
        config, weights = convert(saved["model"], settings)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from None
    meta = {"vocab": vocabulary(config)} if vocabulary else {}
    iteration = saved.get("iter_no")
    at = f", iteration {iteration}" if isinstance(iteration, int) else ""
    source = f"adaptive-span checkpoint {checkpoint.name}{at}"
    write_folder(out, {"model": weights}, {"model": as_dict(config), "source": source, **meta})
    return f"{source}: {_summary(config, weights)}"


def read_checkpoint(path: Path) -> dict:
    """The content of a checkpoint file, with the model's tensors under "model". Executes no code from the file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected a checkpoint of the adaptive-span code")
    try:
        with warnings.catch_warnings(action="ignore"):
            saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's reader fails in a dozen ways on files that are not its own
        if isinstance(error, OSError):
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        refused = re.search(r"GLOBAL ([\w.]{1,99})", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise ValueError(
                f"{path} holds Python objects ({refused[1]}), which could run code when read; "
                "expected a checkpoint with tensors, numbers and texts only"
            ) from None
        raise ValueError(f"{path} is damaged, or is not a file that torch.save wrote") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise ValueError(f'{path} has no "model" with weights; expected a checkpoint of the adaptive-span code')
    return saved


def convert(state: Mapping[str, Tensor], settings: Settings | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and weights of a spanformer model, from a state dict of the paper's code.

    Sizes come from the tensors' shapes, everything else from `settings`. Weights are views of the given tensors where
    possible.
    """
    state = _bare(state)
    config = _configure(state, settings or Settings())
    places = _places(config)
    if wrong := misfit(shapes(state), {key: place.shape for key, place in places.items()}):
        raise ValueError(f"this is not an adaptive-span model: {wrong}")
    for key, tensor in state.items():
        _check_values(key, tensor.detach(), state[key.replace(TWIN, "adaptive_span")])
    return config, {place.name: place.turn(state[key]) for key, place in places.items() if place.name}


@dataclass(frozen=True)
class _Place:
    """The destination of one tensor of the checkpoint."""

    name: str
    """ours; empty: nowhere"""
    shape: tuple[int, ...]
    """theirs"""
    turn: Callable[[Tensor], Tensor] = lambda t: t


def _bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name without the prefix; refuses tensors with fewer numbers than their shape."""
    bare = {}
    for name, tensor in state.items():
        key = str(name).removeprefix(PREFIX)
        if key in bare:
            raise ValueError(f"this is not an adaptive-span model: it has {key} twice, with and without {PREFIX!r}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise ValueError(f"this is not an adaptive-span model: its {key} is not a tensor of floating-point numbers")
        # with strides of zero, a few bytes can have any shape
        if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise ValueError(f"the model is damaged: its {key} has fewer numbers than its shape, {list(tensor.shape)}")
        bare[key] = tensor
    return bare


def _configure(state: dict[str, Tensor], settings: Settings) -> ModelConfig:
    layers = {int(n) for key in state for n in re.findall(r"^layers\.(\d{1,6})\.", key)}
    if layers != set(range(len(layers))):
        raise ValueError(f"this is not an adaptive-span model: its layers have the numbers {sorted(layers)}")
    (dim,) = _shape(state, "layers.0.norm1.weight", 1)
    _, head_dim, span = _shape(state, "key_pe", 3)
    if dim % head_dim:
        raise ValueError(
            f"this is not an adaptive-span model: its head size is {head_dim}, which does not divide {dim}"
        )
    persistent = 0
    feedforward = FeedForwardConfig(kind="none")
    if _any(state, PERSISTENT):
        persistent = _shape(state, f"layers.0.{PERSISTENT}key", 3)[2]
    else:
        inner, _ = _shape(state, "layers.0.ff.fc1.weight", 2)
        feedforward = FeedForwardConfig(kind="relu", dim=inner, bias=True, dropout=settings.dropout)
    vocab, embedding = _embedding(state, dim)
    return ModelConfig(
        vocab=vocab,
        dim=dim,
        layers=len(layers),
        heads=dim // head_dim,
        attention=AttentionConfig(
            kind="adaptive_span" if _any(state, SPAN) else "full", max_span=span, ramp=float(settings.ramp),
            penalty=settings.penalty, dropout=settings.dropout,
        ),
        position=PositionConfig(kind="table"),
        feedforward=feedforward,
        embedding=replace(embedding, dropout=settings.embedding_dropout),
        norm="layer",
        order="post",
        persistent=persistent,
        paper_compat=True,
    )  # fmt: skip


def _embedding(state: dict[str, Tensor], dim: int) -> tuple[int, EmbeddingConfig]:
    """The vocabulary's size, and the configuration of its embedding."""
    clusters = sum(key.startswith("in_emb.emb_layers.") for key in state)
    if not clusters:
        return _shape(state, "in_emb.weight", 2)[0], EmbeddingConfig(bias=True)
    shapes = [_shape(state, f"in_emb.emb_layers.{i}.weight", 2) for i in range(clusters)]
    sizes = [size for _, size in shapes]
    fitting = (d for d in range(2, dim + 1) if sizes == [dim // d**i for i in range(clusters)])
    divisor = next(fitting, None) if clusters > 1 else None
    if divisor is None:
        raise ValueError(
            f"this is not an adaptive-span model: the vectors of its clusters have the sizes {sizes}, "
            f"expected {dim} divided by the same number once more for each"
        )
    *cutoffs, vocab = accumulate(words for words, _ in shapes)
    tied = all(
        theirs in state and torch.equal(state[ours], state[theirs])
        for i in range(clusters)
        for ours, theirs in (
            (f"in_emb.emb_layers.{i}.weight", f"out_emb.out_layers.{i}.weight"),
            (f"in_emb.emb_projs.{i}", f"out_emb.out_projs.{i}"),
        )
        if ours in state
    )
    return vocab, EmbeddingConfig(tied=tied, cutoffs=tuple(cutoffs), divisor=divisor)


def _places(config: ModelConfig) -> dict[str, _Place]:
    """The destination of every tensor of their model, by their name."""
    head_dim, span = config.head_dim, config.attention.max_span
    # key_pe[0, :, S − 1 − d] is for the token d before the previous one
    places = {"key_pe": _Place("position.weight", (1, head_dim, span), lambda t: t[0].flip(1).T)}
    places |= dict(_embedding_places(config))
    for n in range(config.layers):
        for theirs, place in _layer_places(config):
            name = f"blocks.{n}.{place.name}" if place.name else ""
            places[f"layers.{n}.{theirs}"] = _Place(name, place.shape, place.turn)
    return places


def _embedding_places(config: ModelConfig) -> Iterable[tuple[str, _Place]]:
    vocab, dim, cutoffs = config.vocab, config.dim, config.embedding.cutoffs
    if not cutoffs:
        yield "in_emb.weight", _Place("embedding.weight", (vocab, dim))
        yield "out_emb.weight", _Place("head.weight", (vocab, dim))
        yield "out_emb.bias", _Place("head.bias", (vocab,))
        return
    bounds = [0, *cutoffs, vocab]
    for i in range(len(bounds) - 1):
        words, size = bounds[i + 1] - bounds[i], dim // config.embedding.divisor**i
        yield f"in_emb.emb_layers.{i}.weight", _Place(f"embedding.clusters.weights.{i}", (words, size))
        yield f"in_emb.emb_projs.{i}", _Place(f"embedding.clusters.projections.{i}", (dim, size))
        yield f"out_emb.out_layers.{i}.weight", _Place(f"head.clusters.weights.{i}", (words, size))
        yield f"out_emb.out_layers.{i}.bias", _Place(f"head.biases.{i}", (words,))
        yield f"out_emb.out_projs.{i}", _Place(f"head.clusters.projections.{i}", (dim, size))
    yield "out_emb.cluster_proj.weight", _Place("head.tails.weight", (len(cutoffs), dim))
    yield "out_emb.cluster_proj.bias", _Place("head.tails.bias", (len(cutoffs),))


def _layer_places(config: ModelConfig) -> Iterable[tuple[str, _Place]]:
    dim, heads, head_dim, vectors = config.dim, config.heads, config.head_dim, config.persistent
    for theirs, ours in (("query", "query"), ("key", "key"), ("val", "value"), ("out", "out")):
        yield f"attn.proj_{theirs}.weight", _Place(f"attention.{ours}.weight", (dim, dim))
    if config.attention.kind == "adaptive_span":
        yield SPAN + "current_val", _Place("attention.mechanism.ratio", (heads, 1, 1), torch.flatten)
        yield SPAN + "mask_template", _Place("", (config.attention.max_span,))
        if vectors:
            yield SPAN.replace("adaptive_span", TWIN) + "current_val", _Place("", (heads, 1, 1))
            yield SPAN.replace("adaptive_span", TWIN) + "mask_template", _Place("", (config.attention.max_span,))
    norms = ["norm1"]
    if vectors:
        shapes = (heads, head_dim, vectors), (heads, vectors, head_dim)
        yield PERSISTENT + "key", _Place("attention.persistent.key", shapes[0], lambda t: t.transpose(1, 2))
        yield PERSISTENT + "val", _Place("attention.persistent.value", shapes[1])
    else:
        norms.append("norm2")
        inner = config.feedforward.dim
        for theirs, ours, rows, columns in (("fc1", "up", inner, dim), ("fc2", "down", dim, inner)):
            yield f"ff.{theirs}.weight", _Place(f"feedforward.{ours}.weight", (rows, columns))
            yield f"ff.{theirs}.bias", _Place(f"feedforward.{ours}.bias", (rows,))
    for norm in norms:
        yield f"{norm}.weight", _Place(f"{norm}.weight", (dim,))
        yield f"{norm}.bias", _Place(f"{norm}.bias", (dim,))


def _check_values(key: str, tensor: Tensor, twin: Tensor) -> None:
    if not tensor.isfinite().all():
        raise ValueError(f"the model is damaged: its {key} holds numbers that are not finite")
    if key.endswith("current_val") and not ((tensor >= 0) & (tensor <= 1)).all():
        raise ValueError(f"the model is damaged: its {key} holds spans that are not within 0 … 1 of the longest")
    if not torch.equal(tensor, twin):
        raise ValueError(f"the model is damaged: its {key} differs from the one without persistent_memory")


def _shape(state: dict[str, Tensor], key: str, dims: int) -> list[int]:
    if key not in state:
        raise ValueError(f"this is not an adaptive-span model: it has no {key}")
    shape = list(state[key].shape)
    if len(shape) != dims or 0 in shape:
        raise ValueError(f"this is not an adaptive-span model: its {key} has shape {shape}, expected {dims} dimensions")
    return shape


def _any(state: dict[str, Tensor], part: str) -> bool:
    return any(part in key for key in state)


def _summary(config: ModelConfig, weights: dict[str, Tensor]) -> str:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LM(config).parameters())
    longest = config.attention.max_span
    ratios = [t for name, t in weights.items() if name.endswith(".ratio")]
    spans = (
        f"average span {float(torch.cat(ratios).mean()) * longest:.0f} of {longest}" if ratios else f"span {longest}"
    )
    return f"{config.layers} layers, dim {config.dim}, {config.heads} heads, {spans}, {parameters:,} parameters"
