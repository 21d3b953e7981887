"""Tiny models of several architectures with random weights, and a dense oracle of what attached spans compute."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "spanformer[hf]"')

VOCAB = 97
_ALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_LLAMA = _ALL | {"intermediate_size": 48, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable] = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=9),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_LLAMA, head_dim=8, sliding_window=8, layer_types=_MIXED),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=VOCAB, n_positions=128, bos_token_id=1, eos_token_id=None
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_ALL, intermediate_size=48),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        layer_types=_MIXED, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip


def tiny(name: str, seed: int = 0, **changes: object):
    """A model in eval mode, float32. Weights large enough that attention is far from uniform. changes: of its
    configuration."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.15)
            elif name == "gpt_oss" and p.ndim == 1:
                p.normal_(1, 0.3)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def visible(heads: Tensor, ramp: float, sink_tokens: int, length: int, window: int | None, reach: int) -> Tensor:
    """[H, T, T] the weight m of each pair, written from the equation; 0 hides."""
    i = torch.arange(length)
    d = (i[:, None] - i[None])[None].double()
    m = ((heads.double()[:, None, None] + ramp - d) / ramp).clamp(0, 1)
    m = torch.where(d < (reach if window is None else min(reach, window)), m, 0)
    if window is None:
        m = torch.where(i < sink_tokens, 1.0, m)
    return torch.where(d >= 0, m, 0)


def dense(m: Tensor) -> Callable:
    """An attention function that weighs pairs by m [H, T, T] alone, in transformers' interface."""

    def run(module, query, key, value, attention_mask, scaling=None, s_aux=None, **_):
        group = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
        score = (
            query.double() @ k.transpose(-1, -2) * (scaling or 1 / math.sqrt(query.shape[-1]))
            + m[module.layer_idx].log()
        )
        if s_aux is not None:
            score = torch.cat([score, s_aux.double()[None, :, None, None].expand(*score.shape[:3], 1)], -1)
        weight = score.softmax(-1)[..., : k.shape[2]]
        return (weight @ v).transpose(1, 2).to(query.dtype), None

    return run
