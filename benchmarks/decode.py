"""What reading with per-head caches costs, beside the same model with a full cache and SDPA.

    python benchmarks/decode.py decode      # a token after 8,192: attention, the whole model, bytes of the cache
    python benchmarks/decode.py prefill     # 65,536 tokens: seconds and peak memory
    python benchmarks/decode.py stream      # 1,000,000 tokens: does time or memory grow?

Spans as the paper reports them: one head of 8,192 in a third of the layers, the upper ones, the others at most 128
with their ramp. All contenders of a comparison run in turn, round by round; figures are medians over rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.core.peak import peak_of, resident_bytes
from spanformer.memory import Cache, HeadCache
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.layer import split_heads
from spanformer.model.lm import LM
from spanformer.ops import Attended

RAMP, LONG = 32, 8192
SHORT = [0, 2, 5, 9, 16, 30, 60, 96]  # spans; with the ramp, 32 … 128 tokens


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
    """A full cache and SDPA in place of HeadCache.read: all keys and values of the text, for every head."""

    def __init__(self, cache: Cache, context: int, room: int) -> None:
        self.rows = {
            id(layer): [torch.randn(1, len(layer.reach), context + room, layer.dims[0]) for _ in range(2)]
            for layer in cache.layers
        }
        self.context = context

    def read(self, layer: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule, **_options) -> Attended:
        at = self.context
        keys, values = self.rows[id(layer)]
        keys[:, :, at : at + 1], values[:, :, at : at + 1] = k, v
        out = F.scaled_dot_product_attention(q, keys[:, :, : at + 1], values[:, :, : at + 1])
        return Attended(out, out)


def decode(rounds: int = 9, tokens: int = 20, context: int = 8192) -> None:
    lm = model(12)
    cache, spent = lm.cache(1), [0.0]
    lm.read(torch.randint(0, 256, (1, context)), cache, logits="none")
    token, ours = torch.zeros(1, 1, dtype=torch.int64), HeadCache.read
    full = Full(cache, context, 1)

    def timed(read: Callable) -> Callable:
        def inner(*args, **options) -> Attended:
            start = time.perf_counter()
            found = read(*args, **options)
            spent[0] += time.perf_counter() - start
            return found

        return inner

    contenders = {
        "rings": ours,
        "full": lambda *args, **options: full.read(*args, **options),
        "removed": lambda _layer, _q, _k, v, _rule, **_options: Attended(v, v),
    }
    whole: dict[str, list[float]] = {name: [] for name in contenders}
    attention: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, read in contenders.items():
            for timer, into in ((read, whole), (timed(read), attention)):  # the clock itself costs something
                with patch.object(HeadCache, "read", timer):
                    lm.read(token, cache, logits="last")
                    spent[0], start = 0.0, time.perf_counter()
                    for _ in range(tokens):
                        lm.read(token, cache, logits="last")
                    seconds = spent[0] if into is attention else time.perf_counter() - start
                    into[name].append(seconds / tokens)
    for name in contenders:
        each, all_ = statistics.median(attention[name]), statistics.median(whole[name])
        print(f"{name:8} attention {1e3 * each:7.3f} ms a token, whole model {1e3 * all_:7.3f} ms")
    print(f"attention: {_ratio(attention['full'], attention['rings']):.1f} times as fast as SDPA over a full cache")
    print(f"tokens per second: {_ratio(whole['removed'], whole['rings']):.3f} of the model with attention removed")
    reaches = sum(n + 1 for layer in lm.lookback() for n in layer)
    print(f"cache {cache.bytes():,} bytes; sum of reaches {reaches * 2 * 64 * 4:,}; full {cache.full_bytes(context):,}")


def _ratio(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


@torch.inference_mode()
def full_prefill(lm: LM, x: Tensor, piece: int = 1024) -> list[tuple[Tensor, Tensor]]:
    """Every layer over the whole text, by SDPA; all else piece by piece. Keeps the keys and values of all layers."""
    h, kept = lm.embedding(x), []
    turn = lm.position.turner(lambda: torch.arange(x.shape[1]), h.dtype)
    assert turn is not None
    for block in lm.reader.blocks:
        attention = block.attention
        y = block.norm1(h)
        k = turn(split_heads(attention.key(y), attention.kv_heads)).contiguous()
        v = split_heads(attention.value(y), attention.kv_heads)
        q = turn(split_heads(attention.query(y), attention.heads))
        del y
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        del q
        for some in torch.arange(x.shape[1]).split(piece):
            a, z = int(some[0]), int(some[-1]) + 1
            found = attention.out(out[:, :, a:z].transpose(1, 2).flatten(2))
            h[:, a:z] = block.feed(h[:, a:z] + found)[0]
        kept.append((k, v))
    return kept


def prefill(length: int = 65536, layers: int = 3) -> None:
    lm, x = model(layers), torch.randint(0, 256, (1, length))
    lm.read(x[:, :4096], lm.cache(1), logits="none")
    full_prefill(lm, x[:, :4096])

    def rings() -> Cache:
        cache = lm.cache(1)
        lm.read(x, cache, logits="none")
        return cache

    ours = [peak_of(rings) for _ in range(2)]
    theirs = peak_of(lambda: full_prefill(lm, x))
    peak, seconds = (statistics.median(each) for each in zip(*ours, strict=True))
    print(f"{length:,} tokens, {layers} layers: rings {seconds:.1f} s and {peak / 2**20:.0f} MiB")
    print(f"SDPA {theirs[1]:.1f} s and {theirs[0] / 2**20:.0f} MiB")
    print(f"{theirs[1] / seconds:.1f} times as fast, peak {peak / theirs[0]:.3f} of it")


def stream(length: int = 1_000_000, piece: int = 4096, every: int = 100_000) -> None:
    """A small model (3 layers, dim 128, one head of 4,096), so that it fits in a minute. Beside the long text a young
    one of some 10,000 tokens is read in turn, so that a slow moment of the machine hits both alike."""
    lm = model(3, dim=128, heads=4, long=4096)
    cache, x = lm.cache(1), torch.randint(0, 256, (1, piece))
    lm.read(x.repeat(1, 2), begun := lm.cache(1), logits="none")
    rows: list[tuple[float, float, int]] = []
    while int(cache.seen[0]) < length:
        for _ in range(every // piece - 16):
            lm.read(x, cache, logits="none")
        resident = resident_bytes()
        pieces, steps = _against(lm, x, cache, begun.fork(1), 17), _against(lm, x[:, :1], cache, begun.fork(1), 300)
        rows.append((pieces, steps, resident))
        print(f"{int(cache.seen[0]):9,} tokens: {pieces:.3f} of a young text's time in pieces, {steps:.3f} by token; "
              f"{resident / 2**20:.1f} MiB resident, cache {cache.bytes():,} bytes")  # fmt: skip
    for n, name in enumerate(("in pieces", "token by token", "resident")):
        each = [row[n] for row in rows[1:]]
        middle = statistics.median(each) if name == "resident" else 1.0
        print(f"{name}: {min(each) / middle - 1:+.1%} … {max(each) / middle - 1:+.1%} after warm-up")


def _against(lm: LM, x: Tensor, old: Cache, young: Cache, rounds: int) -> float:
    """The time of reading x with one cache, relative to the other."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for cache, into in zip((old, young), times, strict=True):
            start = time.perf_counter()
            lm.read(x, cache, logits="none")
            into.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


if __name__ == "__main__":
    torch.set_num_threads(2)
    {"decode": decode, "prefill": prefill, "stream": stream}[sys.argv[1]](*map(int, sys.argv[2:]))
