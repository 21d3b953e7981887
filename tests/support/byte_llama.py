"""A tiny Llama of bytes with random weights, saved with its tokenizer as Hugging Face saves models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

PROSE = "The river stood behind the market, and nobody had ever seen it so quiet. Über alles ein Wort — 1234.\n"


def save_byte_llama(folder: Path, longest: int, end: str = "") -> None:
    """longest: tokens that it was made for. end: its end-of-text token, if any, after those of the bytes."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(letters)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    last = {"eos_token": end} if end else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **last).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=256 + len(last), max_position_embeddings=longest,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, bos_token_id=None,
        eos_token_id=256 if end else None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
