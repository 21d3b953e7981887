"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View
from spanformer.attention.chunked import Chunked
from spanformer.attention.cross import Cross
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.expire_span import ExpireSpan
from spanformer.attention.forgetting import Forgetting
from spanformer.attention.longformer import Longformer
from spanformer.attention.mixed import Mixed
from spanformer.attention.scoring import Additive, Bilinear, Dot, General
from spanformer.attention.sinks import Sinks
from spanformer.attention.window import Window

ATTENTIONS = {
    "adaptive_span": AdaptiveSpan,
    "additive": Additive,
    "bilinear": Bilinear,
    "chunked": Chunked,
    "cross": Cross,
    "dot": Dot,
    "dynamic_span": DynamicSpan,
    "expire_span": ExpireSpan,
    "forgetting": Forgetting,
    "general": General,
    "longformer": Longformer,
    "mixed": Mixed,
    "sinks": Sinks,
    "window": Window,
}

__all__ = [
    "ATTENTIONS",
    "AdaptiveSpan",
    "Additive",
    "Attention",
    "Bilinear",
    "Chunked",
    "Cross",
    "Dot",
    "DynamicSpan",
    "ExpireSpan",
    "Forgetting",
    "General",
    "Longformer",
    "Mixed",
    "Sinks",
    "View",
    "Window",
    "read_spans",
]
