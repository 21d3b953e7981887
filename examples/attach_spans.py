"""Learned spans for a Hugging Face model: attach, learn in a plain loop, generate with a cache that forgets.

python examples/attach_spans.py                 a tiny Llama with random weights, in seconds
python examples/attach_spans.py MODEL           a causal language model of yours: a folder or a name
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from spanformer import hf
from spanformer.hf.pretrained import load_causal_lm


def tiny_llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    model = load_causal_lm(sys.argv[1]) if len(sys.argv) > 1 else tiny_llama()
    hf.attach(model, max_span=256, ramp=16)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    ids = text[:1024].view(4, 256)  # byte ids, for whatever vocabulary

    ratios = [spans.ratio for spans in hf.head_spans(model).values()]
    others = [p for name, p in model.named_parameters() if not name.endswith("spans.ratio")]
    # a ratio has a whole span to cross, so it takes larger steps than a weight
    optimizer = torch.optim.AdamW([{"params": others, "lr": 3e-3}, {"params": ratios, "lr": 0.02}], weight_decay=0.0)
    for step in range(30):
        loss = model(ids, labels=ids).loss + hf.span_penalty(model, 0.02)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hf.clamp_spans(model)
        if step % 10 == 9:
            kept, full = hf.cache_bytes(model, context=256)
            print(f"step {step + 1:3}  loss {loss.item():.3f}  cache {kept / full:.0%} of full")

    for name, spans in hf.head_spans(model).items():
        print(f"{name}: key/value heads keep {spans.keeps()} tokens and {spans.sink_tokens} sink tokens")

    model.eval()
    cache = hf.SpanCache(model, context=240)
    prompt = ids[:1, :200]
    model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=40,
                   do_sample=False, pad_token_id=0)  # fmt: skip
    print(f"generated from {cache.bytes():,} bytes of keys and values; all of them: {cache.full_bytes():,}")


if __name__ == "__main__":
    main()
