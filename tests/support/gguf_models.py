"""Tiny models as GGUF files, written by the package gguf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("spanformer.hf")

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97, "max_position_embeddings": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def model_of(kind: str, seed: int = 0, **more: int):
    """more: other sizes."""
    torch.manual_seed(seed)
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind](**SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1 if "norm" in name else 0, 0.15)
    return model


def spread(model, sink_logits: bool = True):
    """Windows of 13 to 19 tokens in the first and the last layer, and sink logits."""
    hf.attach(model, max_span=60, ramp=1, sink_tokens=0 if sink_logits else 4, sink_logits=sink_logits)
    ratios, growth = ([0.2, 0.3], [0.9, 0.1], [0.25, 0.25]), (0, 1, 0)
    with torch.no_grad():
        for spans, row, b in zip(hf.head_spans(model).values(), ratios, growth, strict=True):
            spans.ratio.copy_(torch.tensor(row))
            spans.growth.fill_(b)
            if spans.sink_logits is not None:
                spans.sink_logits.copy_(torch.linspace(-2, 1, 4) - b)
    return model


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter orders the rows of a Llama's queries and keys: i and i + D/2 next to each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def save_gguf(model, path: Path, quantisation: str = "Q4_1", **more: int) -> None:
    """A Llama or Qwen2 of transformers; more: further values of the header, without the architecture's name."""
    config, arch = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])  # llama.cpp asks for some
    for name, value in more.items():
        writer.add_uint32(f"{arch}.{name}", value)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "embed_tokens": "token_embd", "norm": "output_norm",
             "lm_head": "output"}  # fmt: skip
    kind = gguf.GGMLQuantizationType[quantisation]
    for key, weight in model.state_dict().items():
        *before, module, end = key.split(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
        weight = permuted(weight, heads) if heads and arch == "llama" else weight
        name = f"blk.{before[2]}.{names[module]}.{end}" if "layers" in before else f"{names[module]}.{end}"
        numbers = weight.float().numpy().astype(np.float32)
        if weight.ndim == 2 and module not in ("embed_tokens", "lm_head"):
            writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpacked(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in float32."""
    found = {}
    for t in gguf.GGUFReader(path).tensors:
        numbers = torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type)))
        found[t.name] = numbers.reshape([int(n) for n in reversed(t.shape)])
    return found
