"""Exports learned spans as a GraniteSWA: windows by layer as transformers, vLLM, SGLang and llama.cpp read them.

A GraniteSWA with neutral multipliers is a Llama whose layers have one sliding window or none, and whose query heads
have a learned sink logit. Llama and Mistral become one as they are; Qwen2's output projection gets a bias of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.hf.export import How, Windows, check_exportable, plan_windows
from spanformer.hf.pretrained import make_causal_lm
from spanformer.hf.spans import NAME, NO_SINK, HeadSpans, head_spans

KINDS = ("llama", "mistral", "qwen2")
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout",
)  # fmt: skip


def to_granite(
    model: nn.Module, *, how: How = "longest", context: int | None = None
) -> tuple[PreTrainedModel, Windows]:
    """A GraniteSWA with the weights and sink logits of this model and one window, and its windows. how, context: as in
    `to_windows`. Sink tokens are lost; `fit-spans --per layer` learns sink logits in their place."""
    from transformers import GraniteSWAConfig

    base = check_exportable(model)
    config, size = base.config, base.config.hidden_size // base.config.num_attention_heads
    if config.model_type not in KINDS:
        raise ValueError(
            f"{type(base).__name__} cannot become a GraniteSWA; expected a model of type {', '.join(KINDS)}: "
            "use to_windows"
        )
    if (getattr(config, "head_dim", None) or size) != size:
        raise ValueError(
            f"{type(base).__name__} has heads of {config.head_dim} numbers, and a GraniteSWA's have hidden_size / "
            f"heads = {size}; it cannot be exported as one"
        )
    windows = plan_windows(base, how=how, context=context or config.max_position_embeddings)
    bias = config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))
    other_config = GraniteSWAConfig(
        **{key: getattr(config, key) for key in _SAME}, attention_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)), attention_multiplier=size**-0.5,
        sliding_window=windows.sliding_window, layer_types=windows.layer_types,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        other = make_causal_lm(other_config, base.dtype)
    weights = {name: t for name, t in base.state_dict().items() if f".{NAME}." not in name}
    for name, spans in head_spans(base).items():
        weights[f"{name}.sinks"] = sinks_of(spans).to(base.dtype)
        if bias and f"{name}.o_proj.bias" not in weights:
            weights[f"{name}.o_proj.bias"] = torch.zeros(config.hidden_size, dtype=base.dtype)
    other.load_state_dict(weights)
    other.generation_config = base.generation_config
    return other.to(base.device).train(base.training), windows  # pyright: ignore[reportArgumentType]


def sinks_of(spans: HeadSpans) -> Tensor:
    """[H] the sink logits of a layer's query heads, in float32; without any: logits that take up no weight."""
    return torch.full((spans.heads,), NO_SINK) if spans.sink_logits is None else spans.sink_logits.detach().float()
