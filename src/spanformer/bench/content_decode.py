"""Part decode of `bench content`: one token of a layer that reads buckets, against a window of as many keys."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from spanformer.bench.gallery import DIM, HEADS
from spanformer.bench.session import Bench, check_same
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM

KINDS = {"lsh(128, 64, 4)": "window(512)", "lsh(128, 64, 1)": "window(128)", "routing(128, 64)": "window(128)"}
"""by kind, the window of as many keys"""
AIM = 2.0
"""times a window's step"""


def layer(kind: str) -> LM:
    """A language model of one layer without a feed-forward, so that a step is its attention and four projections."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=256, dim=HEADS * DIM, layers=1, heads=HEADS, attention=AttentionConfig(kind=kind),
        position=PositionConfig(kind="none"), feedforward=FeedForwardConfig(kind="none"),
    )  # fmt: skip
    return LM(config).eval()


@torch.no_grad()
def measure(bench: Bench) -> None:
    context, rows = bench.options.size(16384, 256), []
    bench.plan(len(KINDS))
    text = torch.randint(256, (1, context), generator=torch.Generator().manual_seed(0))
    for kind, window in KINDS.items():
        bench.begin(f"{kind} reads {context:,} tokens")
        steps: dict[str, Callable[[], object]] = {}
        off, held = 0.0, {}
        for each in (kind, window):
            lm = layer(each)
            off = max(off, _check(lm, text[:, :200]))
            cache = lm.cache(1)
            for piece in text.split(1024, 1):
                lm.decode(piece, cache)
            held[each] = cache.bytes()
            steps[each] = functools.partial(lm.decode, text[:, :1], cache)
        times = bench.compare(f"one token of {kind}", steps, wait=False)
        ratio = times[window].times_as_fast_as(times[kind])
        row = {
            "kind": kind, "window": window, "context": context, "us": 1e6 * times[kind].median,
            "window_us": 1e6 * times[window].median, "times_a_window": ratio, "aim": AIM, "off": off,
            "cache_bytes": held[kind], "window_bytes": held[window],
        }  # fmt: skip
        rows.append(row)
        bench.keep("decode", rows)
        bench.say(
            f"{kind:18} {row['us']:8.1f} µs a token   {window} {row['window_us']:8.1f} µs   {ratio:.2f} times that "
            f"(aim {AIM:g})"
        )


def _check(lm: LM, text: torch.Tensor) -> float:
    """Decoding against one pass."""
    cache = lm.cache(1)
    parts = [lm.decode(piece, cache) for piece in text.tensor_split([150, 151, 152], 1)]
    return check_same("a decoded token", [torch.cat([p for p in parts if p is not None], 1)], [lm(text).logits])
