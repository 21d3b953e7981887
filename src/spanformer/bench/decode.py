"""`spanformer bench decode`: time decoding with per-head KV caches against a full KV cache and SDPA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.core.peak import peak_of, resident_bytes, unsupported
from spanformer.memory import Cache, HeadCache
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.layer import split_heads
from spanformer.model.lm import LM
from spanformer.ops import Attended

RAMP, LONG = 32, 8192
SHORT = [0, 2, 5, 9, 16, 30, 60, 96]  # spans; with the ramp, 32 … 128 tokens


@dataclass(frozen=True)
class DecodeBench(BenchOptions):
    """Time decoding with per-head KV caches against the same model with a full KV cache and SDPA.

        spanformer bench decode --parts decode
        spanformer bench decode --parts prefill stream

    Spans are as in the adaptive-span paper: one head of 8,192 in the upper third of the layers; all others at most
    128, ramp included. The contenders of a comparison are timed in turn; results are medians over rounds.
    """

    rounds: int = 9
    """Rounds; each times all contenders in turn, and results are medians over rounds."""
    parts: tuple[str, ...] = ()
    """decode: one token after 8,192, attention and whole model, and KV cache bytes; prefill: seconds and peak
    memory of 65,536 tokens; stream: whether time or memory grow over 1,000,000 tokens. Default: all."""
    tokens: int = 0
    """Tokens of the text. Default: as above (with --quick: 512, 512 and 4,096)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if self.tokens < 0:
            raise ValueError(f"tokens is {self.tokens}; expected at least 1, or 0 for the default")

    def length(self, whole: int, quick: int) -> int:
        return self.tokens or self.size(whole, quick)


def run(bench: Bench[DecodeBench]) -> None:
    for part in bench.options.parts or PARTS:
        bench.keep(part, PARTS[part](bench))


def model(layers: int, dim: int = 512, heads: int = 8, long: int = LONG) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=256, dim=dim, layers=layers, heads=heads, norm="layer", position=PositionConfig(kind="rotary"),
        attention=AttentionConfig(max_span=long - RAMP, ramp=RAMP),
        feedforward=FeedForwardConfig(kind="relu", dim=4 * dim, bias=True),
    )  # fmt: skip
    lm = LM(config).eval()
    with torch.no_grad():
        for n, spans in enumerate(lm.spans_modules()):
            tokens = torch.tensor(SHORT[:heads], dtype=torch.float32)
            if 3 * n >= 2 * layers:
                tokens[-1] = long - RAMP
            spans.ratio.copy_(tokens / spans.max_span)
    return lm


class Full:
    """A full KV cache and SDPA instead of HeadCache.read: all keys and values of the text, for every head."""

    def __init__(self, cache: Cache, context: int, room: int) -> None:
        self.rows = {
            id(layer): [torch.randn(1, len(layer.reach), context + room, layer.dims[0]) for _ in range(2)]
            for layer in cache.rings()
        }
        self.context = context

    def read(self, layer: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule, **_options) -> Attended:
        at = self.context
        keys, values = self.rows[id(layer)]
        keys[:, :, at : at + 1], values[:, :, at : at + 1] = k, v
        out = F.scaled_dot_product_attention(q, keys[:, :, : at + 1], values[:, :, : at + 1])
        return Attended(out, out)


class Clock:
    """Seconds inside the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, read: Callable) -> Callable:
        def timed(*args, **options) -> Attended:
            start = time.perf_counter()
            found = read(*args, **options)
            self.seconds += time.perf_counter() - start
            return found

        return timed


def decode(bench: Bench[DecodeBench]) -> dict:
    """A token after a long text: with rings, with a full cache, and with attention removed."""
    context, tokens = bench.options.length(8192, 512), bench.options.size(20, 2)
    bench.plan(bench.rounds + 1)
    bench.begin(f"reading {context:,} tokens")
    lm = model(bench.options.size(12, 3), long=max(context, 256))
    cache, clock = lm.cache(1), Clock()
    lm.decode(torch.randint(0, 256, (1, context)), cache, logits="none")
    full = Full(cache, context, 1)
    contenders: dict[str, Callable] = {
        "rings": HeadCache.read,
        "full": lambda *args, **options: full.read(*args, **options),
        "removed": lambda _layer, _q, _k, v, _rule, **_options: Attended(v, v),
    }
    whole: dict[str, list[float]] = {name: [] for name in contenders}
    attention: dict[str, list[float]] = {name: [] for name in contenders}
    bench.end()
    for _ in range(bench.rounds):
        bench.begin(f"a token after {context:,}")
        for name, read in contenders.items():
            whole[name].append(_seconds_a_token(lm, cache, read, tokens))
            clock.seconds = 0.0  # in a separate pass, because the clock itself takes time
            _seconds_a_token(lm, cache, clock.wrap(read), tokens)
            attention[name].append(clock.seconds / (tokens + 1))
        bench.end()
    reaches = sum(n + 1 for layer in lm.context_length() for n in layer)
    found = {
        "context": context,
        "attention_ms": {name: 1e3 * statistics.median(each) for name, each in attention.items()},
        "model_ms": {name: 1e3 * statistics.median(each) for name, each in whole.items()},
        "attention_times_as_fast_as_full": _ratio(attention["full"], attention["rings"]),
        "share_of_tokens_without_attention": _ratio(whole["removed"], whole["rings"]),
        "cache_bytes": cache.bytes(), "reach_bytes": reaches * 2 * 64 * 4, "full_bytes": cache.full_bytes(context),
    }  # fmt: skip
    for name in contenders:
        each, all_ = found["attention_ms"][name], found["model_ms"][name]
        bench.say(f"{name:8} attention {each:7.3f} ms a token, whole model {all_:7.3f} ms")
    bench.say(f"attention: {found['attention_times_as_fast_as_full']:.1f} times as fast as SDPA over a full cache")
    share = found["share_of_tokens_without_attention"]
    bench.say(f"tokens per second: {share:.3f} of the model with attention removed")
    bench.say(
        f"cache {found['cache_bytes']:,} bytes; sum of reaches {found['reach_bytes']:,}; full {found['full_bytes']:,}"
    )
    return found


def _seconds_a_token(lm: LM, cache: Cache, read: Callable, tokens: int) -> float:
    """With `read` in place of HeadCache.read, after one token that is not counted."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    with patch.object(HeadCache, "read", read):
        lm.decode(token, cache, logits="last")
        start = time.perf_counter()
        for _ in range(tokens):
            lm.decode(token, cache, logits="last")
        return (time.perf_counter() - start) / tokens


def _ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


@torch.inference_mode()
def full_prefill(lm: LM, x: Tensor, piece: int = 1024) -> list[tuple[Tensor, Tensor]]:
    """Every layer over the whole text, by SDPA; all else piece by piece. Keeps the keys and values of all layers."""
    h, kept = lm.embedding(x), []
    encode = lm.positions()[0].encode_at(lambda: torch.arange(x.shape[1]), h.dtype)
    assert encode is not None  # rotary
    for block in lm.decoding_rules.blocks:
        attention = block.attention
        y = block.norm1(h)
        q, k = encode(*(split_heads(project(y), attention.heads) for project in (attention.query, attention.key)))
        v = split_heads(attention.value(y), attention.heads)
        k = k.contiguous()
        del y
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        del q
        for some in torch.arange(x.shape[1]).split(piece):
            a, z = int(some[0]), int(some[-1]) + 1
            found = attention.out(out[:, :, a:z].transpose(1, 2).flatten(2))
            h[:, a:z] = block.feed(h[:, a:z] + found)[0]
        kept.append((k, v))
    return kept


def prefill(bench: Bench[DecodeBench]) -> dict:
    """Seconds and peak memory of a long prompt: rings twice, SDPA once."""
    if reason := unsupported():
        raise ValueError(f"part prefill measures memory: {reason}")
    length, layers = bench.options.length(65536, 512), 3
    bench.plan(4)
    bench.begin("warming up")
    lm, x = model(layers), torch.randint(0, 256, (1, length))
    lm.decode(x[:, :4096], lm.cache(1), logits="none")
    full_prefill(lm, x[:, :4096])
    bench.end()

    def rings() -> Cache:
        cache = lm.cache(1)
        lm.decode(x, cache, logits="none")
        return cache

    ours = []
    for _ in range(2):
        bench.begin(f"reading {length:,} tokens with rings")
        ours.append(peak_of(rings))
        bench.end()
    bench.begin(f"reading {length:,} tokens with SDPA")
    their_peak, their_seconds = peak_of(lambda: full_prefill(lm, x))
    bench.end()
    peak, seconds = (statistics.median(each) for each in zip(*ours, strict=True))
    bench.say(f"{length:,} tokens, {layers} layers: rings {seconds:.1f} s and {peak / 2**20:.0f} MiB")
    bench.say(f"SDPA {their_seconds:.1f} s and {their_peak / 2**20:.0f} MiB")
    share = peak / their_peak if their_peak else float("nan")
    bench.say(f"{their_seconds / seconds:.1f} times as fast, peak {share:.3f} of it")
    return {
        "tokens": length, "layers": layers, "rings": {"seconds": seconds, "peak_bytes": peak},
        "sdpa": {"seconds": their_seconds, "peak_bytes": their_peak},
    }  # fmt: skip


def stream(bench: Bench[DecodeBench]) -> dict:
    """A small model (3 layers, dim 128, one head of 4,096), so that it fits in a minute. A short text of some 10,000
    tokens is timed in turn with the long one, so that a slow moment of the machine affects both."""
    if reason := unsupported():
        raise ValueError(f"part stream measures memory: {reason}")
    length, piece = bench.options.length(1_000_000, 4096), bench.options.size(4096, 64)
    every, rounds = max(length // 10, 20 * piece), (3, 3) if bench.options.quick else (17, 300)
    lm = model(3, dim=128, heads=4, long=piece)
    cache, x = lm.cache(1), torch.randint(0, 256, (1, piece))
    lm.decode(x.repeat(1, 2), begun := lm.cache(1), logits="none")
    rows: list[dict] = []
    bench.plan(-(-length // every))
    while int(cache.seen[0]) < length:
        bench.begin(f"{int(cache.seen[0]):,} of {length:,} tokens read")
        for _ in range(every // piece - rounds[0]):
            lm.decode(x, cache, logits="none")
        resident = resident_bytes()
        pieces = _against(lm, x, cache, begun.fork(1), rounds[0])
        tokens = _against(lm, x[:, :1], cache, begun.fork(1), rounds[1])
        rows.append({"seen": int(cache.seen[0]), "pieces": pieces, "tokens": tokens, "resident_bytes": resident})
        bench.say(
            f"{rows[-1]['seen']:9,} tokens: {pieces:.3f} of a young text's time in pieces, {tokens:.3f} by token; "
            f"{resident / 2**20:.1f} MiB resident, cache {cache.bytes():,} bytes"
        )
        bench.end()
    names = {"pieces": "in pieces", "tokens": "token by token", "resident_bytes": "resident"}
    for key, name in names.items():
        each = [row[key] for row in rows[1:] or rows]
        middle = statistics.median(each) if key == "resident_bytes" else 1.0
        bench.say(f"{name}: {min(each) / middle - 1:+.1%} … {max(each) / middle - 1:+.1%} after warm-up")
    return {"tokens": length, "rows": rows}


def _against(lm: LM, x: Tensor, old: Cache, young: Cache, rounds: int) -> float:
    """The time of processing x with the old cache, relative to the young one."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for cache, into in zip((old, young), times, strict=True):
            start = time.perf_counter()
            lm.decode(x, cache, logits="none")
            into.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


PARTS = {"decode": decode, "prefill": prefill, "stream": stream}
OPTIONS = DecodeBench
