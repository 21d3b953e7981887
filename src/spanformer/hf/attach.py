"""Learned spans for a Hugging Face causal language model, without editing its code.

    attach(model, max_span=2048)      each attention module gets `spans` and uses them
    detach(model)                     restores the model

Attention modules and their head counts and sizes are not guessed from the architecture: a forward pass over two tokens
records the calls of the attention function, and a backward pass checks that gradients arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from spanformer.hf.attention import IMPLEMENTATION, Seen, make_mask, register
from spanformer.hf.far import FarMap
from spanformer.hf.spans import NAME, HeadSpans, check_attach

PROBE = "spanformer_probe"
CONFIG = "spanformer"
"""the key of config.json with the settings of `attach`"""
NEEDED = "attn_implementation"
"""the key of config.json that keeps transformers from loading the model without its spans"""


def attach(
    model: nn.Module,
    *,
    max_span: int | None = None,
    init: float = 1.0,
    ramp: float = 32.0,
    per: str = "kv_head",
    sink_tokens: int = 4,
    far_features: int = 0,
    sink_logits: bool = False,
) -> PreTrainedModel:
    """Give every attention head of a causal language model a learned span, and return the model.

    max_span: S, the longest span; default: the model's context (max_position_embeddings).
    init: initial spans as a ratio of S; at 1.0 the output is unchanged within S tokens.
    ramp: width of a span's soft edge, in tokens.
    per: "kv_head", one span per KV head, so that the KV cache can shrink; "head", one per query head.
    sink_tokens: this many first tokens of a text stay visible to all heads (except in layers that have their own
    sliding window).
    far_features: every KV head also has a linear state of this many learned features over what lies beyond its span
    (except in layers that have their own sliding window); 0: none.
    sink_logits: every query head has a learned logit without a value in its softmax (at first one without weight), the
    form in which other engines keep what sink tokens are for.
    """
    check_attach(max_span, init, ramp, per, sink_tokens, far_features, sink_logits)
    base = base_of(model)
    _refuse_model(base)
    layers = probe(base)
    if max_span is None:
        max_span = getattr(base.config, "max_position_embeddings", None)
        if max_span is None:
            raise ValueError(f"{type(base).__name__} has no max_position_embeddings; pass max_span")
    if far_features and all(found.window is not None for found in layers.values()):
        raise ValueError(
            f"far_features is {far_features}, and every layer of {type(base).__name__} has its own sliding window, "
            "beyond which it never saw; attach spans without states"
        )
    before = base.config._attn_implementation
    for name, found in layers.items():
        if found.heads % found.kv_heads:
            raise ValueError(
                f"{name} has {found.heads} heads over {found.kv_heads} key/value heads, which is not a whole "
                "number of groups; spans cannot be attached"
            )
    for name, found in layers.items():
        spans = HeadSpans(
            found.heads, found.kv_heads, max_span, ramp=ramp, init=init, per=per, sink_tokens=sink_tokens,
            window=found.window, head_size=found.key_size + found.value_size,
            far=found.far_map(far_features, max_span), sink_logits=sink_logits,
        )  # fmt: skip
        base.get_submodule(name).add_module(NAME, spans.to(found.device))
    register()
    base.set_attn_implementation(IMPLEMENTATION)
    settings = {"max_span": max_span, "ramp": float(ramp), "per": per, "sink_tokens": sink_tokens}
    settings |= {"far_features": far_features} if far_features else {}
    setattr(base.config, CONFIG, settings | ({"sink_logits": True} if sink_logits else {}))
    setattr(base.config, NEEDED, IMPLEMENTATION)
    base._attention_before_spans = before  # type: ignore[assignment]
    return model  # type: ignore[return-value]


def detach(model: nn.Module) -> PreTrainedModel:
    """Remove the spans: the model attends as before `attach` and has no added parameters."""
    base = base_of(model)
    if not hasattr(base, "_attention_before_spans"):
        raise ValueError(f"{type(base).__name__} has no spans to detach; attach them first")
    for module in list(base.modules()):
        if NAME in module._modules:
            delattr(module, NAME)
    base.set_attn_implementation(base.__dict__.pop("_attention_before_spans"))
    delattr(base.config, CONFIG)
    delattr(base.config, NEEDED)
    return model  # type: ignore[return-value]


def forget_spans(config: PreTrainedConfig) -> None:
    """Make a saved model's configuration that of the model without spans, as it is before `attach`."""
    delattr(config, CONFIG)
    config._attn_implementation = None


def base_of(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, without PEFT's wrapper."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"model is a {type(base).__name__}; expected a transformers PreTrainedModel "
            "(for a model of ours see spanformer.hf.modeling)"
        )
    return base


@dataclass(frozen=True)
class Layer:
    """Observed sizes of an attention module."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    device: torch.device

    def far_map(self, features: int, max_span: int) -> FarMap | None:
        """Nothing lies beyond the spans of a layer that never saw beyond its own window."""
        if not features or self.window is not None:
            return None
        return FarMap(self.heads, self.kv_heads, features, self.key_size, self.value_size, max_span)


def probe(model: PreTrainedModel) -> dict[str, Layer]:
    """Attention modules by name, found by a forward and backward pass over two tokens."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, Layer] = {}
    leaves: list[Tensor] = []

    def watch(module, query, key, value, attention_mask, softcap=None, position_bias=None, **_others):
        name = names[module]
        if name in found:
            raise ValueError(f"{name} calls attention twice in one pass, so one span cannot describe it")
        for term, value_of in (("softcap", softcap), ("position_bias", position_bias)):
            if value_of is not None:
                raise ValueError(
                    f"{name} uses {term}, which spans do not support; for Gemma 2 set "
                    "config.attn_logit_softcapping = None to turn it off"
                )
        if not isinstance(attention_mask, Seen) or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name} attends without a causal mask (an encoder or cross-attention); spans need causal attention"
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        found[name] = Layer(
            heads, kv_heads, key.shape[3], value.shape[3], attention_mask.window, query.device
        )  # fmt: skip
        leaf = value.new_zeros((query.shape[0], query.shape[2], heads, value.shape[3]), requires_grad=True)
        leaves.append(leaf)
        return leaf, None

    AttentionInterface.register(PROBE, watch)
    AttentionMaskInterface.register(PROBE, make_mask)
    before, modes = model.config._attn_implementation or "eager", [(m, m.training) for m in model.modules()]
    try:
        model.set_attn_implementation(PROBE)
        model.eval()
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.get_input_embeddings().parameters()).device)
        with torch.inference_mode(False), torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            if not found:
                raise ValueError(_NO_INTERFACE.format(type(model).__name__))
            grads = (None,) * len(leaves)
            if logits.requires_grad:
                grads = torch.autograd.grad(logits.float().sum(), leaves, allow_unused=True)
    finally:
        model.set_attn_implementation(before)
        for module, training in modes:
            module.training = training
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(PROBE, None)
    deaf = [name for name, grad in zip(found, grads, strict=True) if grad is None]
    if deaf:
        raise ValueError(
            f"no gradient reaches {deaf[0]} ({len(deaf)} of {len(found)} attention layers): a quantised or "
            "frozen module after it cannot be differentiated; load the model unquantised to learn spans"
        )
    return found


_NO_INTERFACE = (
    "{} does not go through transformers' attention interface, so spans cannot be attached to it; use a model "
    "that does (Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX, …)"
)


def _refuse_model(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if hasattr(model, "_attention_before_spans"):
        raise ValueError(f"{name} has spans already; detach them first to attach others")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name} has cross-attention, which attends to another text, without distances to "
            "learn; spans are for decoder-only models"
        )
    if config.get_text_config() is not config:
        raise ValueError(
            f"{name} consists of several models; load only its text model as a causal language model and attach spans "
            "to that"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    # a GGUF model lists the modules that stayed packed; mostly there are none
    if quantizer is not None and not quantizer.is_trainable and getattr(quantizer, "packed_modules", True):
        raise ValueError(
            f"{name} is quantised ({type(quantizer).__name__}) in a way that gives no gradients; load the model "
            "unquantised to learn spans"
        )
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(f"{name} is not a causal language model; load it with AutoModelForCausalLM")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ValueError(
            f"{name} attends within chunks (attention_chunk_size); spans do not support that, so use another model"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(_NO_INTERFACE.format(name))
