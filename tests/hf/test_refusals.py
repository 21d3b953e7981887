"""What spans cannot be attached to, and what a model with spans cannot be given: one sentence each."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from spanformer import hf
from support.hf_models import VOCAB, tiny, tokens, transformers

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "intermediate_size": 16,
}


def bert():
    return transformers.BertLMHeadModel(transformers.BertConfig(**SMALL))


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def gpt2_across():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCAB, add_cross_attention=True)
    return transformers.GPT2LMHeadModel(config)


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8))


def mamba():
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    )


def bloom():
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    )


def base_alone():
    return tiny("llama").model


def quantised():
    """PyTorch's own 8-bit linear layers, the head among them."""
    return torch.ao.quantization.quantize_dynamic(tiny("llama"), {nn.Linear}, dtype=torch.qint8)


def quantised_inside():
    """One layer of three: gradients go around it to the others."""
    model = tiny("llama")
    torch.ao.quantization.quantize_dynamic(model.model.layers[1], {nn.Linear}, dtype=torch.qint8, inplace=True)
    return model


def quantised_by_transformers():
    """As from_pretrained leaves it; where only the feed-forward is quantised, gradients would go around it."""
    model = tiny("llama")
    model.hf_quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
        transformers.HiggsConfig(), pre_quantized=True
    )
    return model


MODELS = {
    "an encoder": (bert, "BertLMHeadModel attends without a causal mask|lets tokens see later ones"),
    "an encoder and a decoder": (t5, "T5ForConditionalGeneration has cross-attention.*decoder-only"),
    "cross-attention": (gpt2_across, "GPT2LMHeadModel has cross-attention"),
    "capped scores": (gemma2, "uses softcap.*attn_logit_softcapping = None"),
    "no attention": (mamba, "MambaForCausalLM does not go through transformers' attention interface"),
    "attention of its own": (bloom, "BloomForCausalLM does not go through transformers' attention interface"),
    "no head": (base_alone, "LlamaModel is not a causal language model; load it with AutoModelForCausalLM"),
    "not theirs": (lambda: nn.Linear(2, 2), "model is a Linear; expected a transformers PreTrainedModel"),
    "quantised": (
        quantised,
        r"no gradient reaches model.layers.0.self_attn \(3 of 3.*load the model unquantised",
    ),
    "quantised inside": (
        quantised_inside,
        r"no gradient reaches model.layers.1.self_attn \(1 of 3.*load the model unquantised",
    ),
    "quantised by transformers": (quantised_by_transformers, r"is quantised \(HiggsHfQuantizer\).*unquantised"),
}


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_have_spans(name: str) -> None:
    make, reason = MODELS[name]
    model = make()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    names = set(model.state_dict())
    with pytest.raises(ValueError, match=reason):
        hf.attach(model)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    assert set(model.state_dict()) == names


ARGUMENTS = {
    "max_span": ({"max_span": 0}, "max_span is 0; expected 1 … 2,147,483,648 tokens"),
    "max_span is whole": ({"max_span": 2.5}, "max_span is 2.5; expected a whole number"),
    "init": ({"init": 1.5}, "init is 1.5; expected a ratio of max_span, 0 … 1"),
    "ramp": ({"ramp": 0}, "ramp is 0; expected a positive"),
    "per": ({"per": "layer"}, "per is 'layer'; expected 'kv_head'"),
    "sink_tokens": ({"sink_tokens": -1}, "sink_tokens is -1; expected a number of tokens, at least 0"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    options, reason = ARGUMENTS[name]
    model = tiny("llama")
    with pytest.raises(ValueError, match=reason):
        hf.attach(model, **options)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "spanformer")


def test_twice_and_not_at_all() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no spans to detach"):
        hf.detach(model)
    with pytest.raises(ValueError, match=r"has no spans; call spanformer.hf.attach on it first"):
        hf.head_spans(model)
    hf.attach(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has spans already; detach them first"):
        hf.attach(model)
    model.set_attn_implementation("sdpa")
    hf.detach(model)
    model.set_attn_implementation("spanformer")
    with pytest.raises(ValueError, match=r"LlamaAttention has no spans.*call spanformer.hf.attach"):
        model(tokens(1, 3))


def test_calls() -> None:
    model, ids = hf.attach(tiny("llama")), tokens(1, 4)
    with pytest.raises(ValueError, match=r"attention mask is a tensor of shape .1, 1, 4, 4.; with spans pass"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4).bool())
    with pytest.raises(ValueError, match="lets tokens see later ones, but spans are causal"):
        model(ids, is_causal=False)
    with pytest.raises(ValueError, match="output_attentions is True; attention with spans never computes all weights"):
        model(ids, output_attentions=True)


def test_window_that_changed() -> None:
    model = hf.attach(tiny("mistral"))
    model.config.sliding_window = 5
    with pytest.raises(ValueError, match="sliding window is 5, and was 9 when spans were attached; detach and attach"):
        model(tokens(1, 12))


@pytest.mark.parametrize("name, length", [("llama", 5), ("mistral", 5), ("mistral", 20), ("gemma3", 20)])
def test_static_cache(name: str, length: int) -> None:
    model = hf.attach(tiny(name))
    with pytest.raises(ValueError, match=r"a static cache has room for every token.*SpanCache"):
        model.generate(tokens(1, length), max_new_tokens=2, pad_token_id=0, cache_implementation="static")


@pytest.mark.parametrize(
    "stand_in, reason",
    [
        ("None", 'spanformer.hf works on transformers, which is missing: pip install "spanformer[hf]"'),
        ("types.SimpleNamespace(__version__='4.57.1')", "transformers is 4.57.1, and spanformer.hf needs 5.0 or newer"),
    ],
)
def test_without_transformers(stand_in: str, reason: str) -> None:
    code = f"import sys, types; sys.modules['transformers'] = {stand_in}; import spanformer; import spanformer.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert reason in done.stderr.splitlines()[-1]
