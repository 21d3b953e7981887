"""Small language models of every kind, for tests that hold two ways of running them against each other."""

from __future__ import annotations

from dataclasses import replace

import torch

from spanformer.kinds import POSITIONS as POSITION_KINDS
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM

SMALL = ModelConfig(
    vocab=37,
    dim=32,
    layers=3,
    heads=4,
    attention=AttentionConfig(max_span=40, ramp=5.0, init=0.3),
    feedforward=FeedForwardConfig(dim=48),
)


def with_attention(config: ModelConfig, **changes) -> ModelConfig:
    return replace(config, attention=replace(config.attention, **changes))


KINDS = tuple(POSITION_KINDS)


def position(kind: str) -> PositionConfig:
    return PositionConfig(kind=kind, length=128 if POSITION_KINDS[kind].needs_length else 0, clip=3)  # pyright: ignore


POSITIONS = {kind: replace(SMALL, position=position(kind)) for kind in KINDS}
CONFIGS = POSITIONS | {
    "paper": replace(
        SMALL, norm="layer", order="post", position=PositionConfig(kind="table"),
        feedforward=FeedForwardConfig(kind="relu", bias=True), embedding=EmbeddingConfig(bias=True),
    ),
    "grouped": replace(SMALL, kv_heads=2),
    "grouped, tied spans": with_attention(replace(SMALL, kv_heads=2), tied=True),
    "dynamic": with_attention(SMALL, kind="dynamic_span"),
    "window": with_attention(SMALL, kind="window", window=9),
    "full": with_attention(SMALL, kind="full"),
    "hybrid layers": with_attention(SMALL, stack=("window(7)", "adaptive_span")),
    "hybrid heads": with_attention(SMALL, stack=("3 window(7) + 1 adaptive_span", "2 adaptive_span + 2 dynamic_span")),
    "experts": replace(SMALL, feedforward=FeedForwardConfig(dim=24, experts=5, per_token=2)),
    "persistent": replace(SMALL, persistent=11, feedforward=FeedForwardConfig(kind="none")),
    "adaptive embedding": replace(SMALL, embedding=EmbeddingConfig(cutoffs=(10, 20), divisor=2, tied=True)),
    "tied": replace(SMALL, embedding=EmbeddingConfig(tied=True)),
}  # fmt: skip


def make(config: ModelConfig) -> LM:
    """In float64, with spans of every length, so that heads fall into several groups."""
    torch.manual_seed(5)
    lm = LM(config).double().eval()
    with torch.no_grad():
        for p in lm.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.05)
        for module in lm.spans_modules():
            module.ratio.copy_(torch.linspace(0, 1, module.kv_heads))
    return lm


def text(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 37, (batch, length), generator=torch.Generator().manual_seed(3))
