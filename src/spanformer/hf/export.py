"""Exports learned spans as sliding windows, which other engines support: a configuration with `layer_types` and one
`sliding_window`, in which each layer either has that window or full attention.

`to_granite` (granite.py) makes a GraniteSWA instead, which also has a learned sink logit for each query head.

This format can express less than spans: all heads of a layer share its window, all layers share one number, there is no
ramp and there are no sinks. `to_windows` makes such a model, and `compare_losses` measures what the conversion costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import MinistralConfig, PreTrainedModel

from spanformer.hf.attach import CONFIG, NEEDED, base_of
from spanformer.hf.pretrained import make_causal_lm
from spanformer.hf.spans import NAME, HeadSpans, head_spans, state_bytes

How = Literal["longest", "mean", "shortest"]
_SAME_AS_MINISTRAL = ("llama", "mistral")
_NOT_COPIED = (CONFIG, NEEDED, "transformers_version")


@dataclass(frozen=True)
class Windows:
    """A model's spans converted to windows."""

    sliding_window: int
    layer_types: list[str]
    wanted: list[int]
    """[layers] the window that each layer needs"""
    tokens: int
    """sum over layers of the tokens kept of `context` tokens"""
    context: int


def plan_windows(model: nn.Module, *, how: How = "longest", context: int) -> Windows:
    """`choose_windows` of a model's layers."""
    return choose_windows(list(head_spans(model).values()), how=how, context=context)


def choose_windows(layers: list[HeadSpans], *, how: How = "longest", context: int) -> Windows:
    """The window of each layer is that of its longest or shortest head, or their mean (rounded up). The one number that
    all layers share is the one with which they keep the fewest tokens of the context: layers that need more see
    everything.
    """
    if how not in ("longest", "mean", "shortest"):
        raise ValueError(f"how is {how!r}; expected 'longest', 'mean' or 'shortest'")
    if context < 1:
        raise ValueError(f"context is {context}; expected at least 1 token")
    wanted = [_window(spans.keeps(context), how) for spans in layers]

    def kept(window: int) -> int:
        return sum(min(window, context) if n <= window else context for n in wanted)

    best = min(sorted(set(wanted)), key=kept)
    types = ["sliding_attention" if n <= best else "full_attention" for n in wanted]
    return Windows(best, types, wanted, kept(best), context)


def _window(keeps: list[int], how: How) -> int:
    if how == "mean":
        return -(-sum(keeps) // len(keeps))
    return max(keeps) if how == "longest" else min(keeps)


def to_windows(
    model: nn.Module, *, how: How = "longest", context: int | None = None
) -> tuple[PreTrainedModel, Windows]:
    """A model with plain windows and the weights of this one, and its windows; `save_pretrained` writes it for
    any engine. context: the length for which its windows should keep the fewest tokens; default: the model's context.

    Llama and Mistral have no windows by layer: they become a Ministral, which differs only in those.
    """
    base = check_exportable(model)
    config = base.config
    if any(spans.sink_logits is not None for spans in head_spans(base).values()):
        raise ValueError(
            f"{type(base).__name__} has learned sink logits, which only the form of GraniteSWA holds: to_granite, or "
            "export-windows --form granite"
        )
    windows = plan_windows(base, how=how, context=context or config.max_position_embeddings or 0)
    values = {key: value for key, value in config.to_dict().items() if key not in _NOT_COPIED}
    if config.model_type in _SAME_AS_MINISTRAL:
        if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
            raise ValueError(
                f"{type(base).__name__} has biases, which models with windows by layer do not have; it cannot be "
                "exported"
            )
        kind: type = MinistralConfig
        values = {key: value for key, value in values.items() if key in MinistralConfig().to_dict()}
        values.pop("model_type")
    else:
        kind = type(config)
        if "layer_types" not in values or "sliding_window" not in values:
            raise ValueError(
                f"{type(base).__name__} has no windows by layer (layer_types) in its configuration, so its spans "
                "cannot be exported as such; save it with save_pretrained instead"
            )
        if "use_sliding_window" in values:
            values["use_sliding_window"] = True
        if "max_window_layers" in values:  # layer_types overrules it; vLLM's Qwen 2 asserts that it is the number of
            values["max_window_layers"] = 0  # layers, and then shows all layers everything
        # Gemma 3 has rotary parameters by kind of layer
        if "full_attention" in (rotary := values.get("rope_parameters") or {}):
            rotary["sliding_attention"] = rotary["full_attention"]
    values |= {"layer_types": windows.layer_types, "sliding_window": windows.sliding_window}
    values.pop("architectures", None)
    with torch.random.fork_rng(devices=[]):
        other = make_causal_lm(kind(**values), base.dtype)
    weights = {name: t for name, t in base.state_dict().items() if f".{NAME}." not in name}
    other.load_state_dict(weights)
    other.generation_config = base.generation_config
    other.to(base.device).train(base.training)  # pyright: ignore[reportArgumentType]
    check_same(base, other, min(windows.sliding_window, 16))
    return other, windows


def check_exportable(model: nn.Module) -> PreTrainedModel:
    """The model itself; refuse one whose spans no other engine computes."""
    base = base_of(model)
    if any(spans.window is not None for spans in head_spans(base).values()):
        raise ValueError(
            f"{type(base).__name__} has a sliding window besides its spans, and a configuration has only "
            "one number for all layers; it cannot be exported"
        )
    if state_bytes(base):
        raise ValueError(
            f"{type(base).__name__} has linear states beyond its spans, which no other engine computes; fit it without "
            "them (--far none) to export windows"
        )
    if hasattr(model, "peft_config"):
        raise ValueError("the model has PEFT adapters; export model.merge_and_unload()")
    return base


@torch.no_grad()
def check_same(model: PreTrainedModel, other: PreTrainedModel, length: int) -> None:
    """Refuse a kind of model whose layers with a window differ in other ways too (Cohere 2 rotates keys and
    queries only in those): on a text as short as the window both models must agree."""
    ids = torch.arange(length, device=model.device)[None] % model.config.vocab_size
    modes, spans = (model.training, other.training), model.config._attn_implementation
    try:
        model.set_attn_implementation(other.config._attn_implementation)  # type: ignore[arg-type]
        one, two = (each.eval()(input_ids=ids, use_cache=False).logits.float() for each in (model, other))
    finally:
        model.set_attn_implementation(spans)  # type: ignore[arg-type]
        model.train(modes[0])
        other.train(modes[1])
    if float((one - two).abs().max()) > 0.01 * float(one.abs().max()):
        raise ValueError(
            f"{type(model).__name__} has layers with a window that differ from others in more than the window, so its "
            "spans "
            "cannot be exported as windows by layer; save it with save_pretrained instead"
        )


@torch.no_grad()
def mean_loss(model: nn.Module, ids: Tensor) -> float:
    """Nats per token of ids [N, T], computed row by row, each a separate text."""
    if ids.ndim != 2 or ids.shape[1] < 2 or not len(ids):
        raise ValueError(f"ids has shape {list(ids.shape)}; expected [N, T] with at least 2 tokens a row")
    training, total = model.training, 0.0
    model.eval()
    try:
        for row in ids:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
            total += float(nn.functional.cross_entropy(logits.float(), row[1:].to(logits.device), reduction="sum"))
    finally:
        model.train(training)
    return total / (len(ids) * (ids.shape[1] - 1))


def compare_losses(model: nn.Module, ids: Tensor, *, how: How = "longest") -> dict[str, float]:
    """Nats per token of ids [N, T] with spans, and with the windows that `to_windows` would export for T tokens."""
    other, _ = to_windows(model, how=how, context=ids.shape[1])
    return {"spans": mean_loss(model, ids), "windows": mean_loss(other, ids)}
