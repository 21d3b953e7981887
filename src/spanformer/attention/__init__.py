"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.longformer import Longformer
from spanformer.attention.mixed import Mixed
from spanformer.attention.window import Window

ATTENTIONS = {
    "adaptive_span": AdaptiveSpan,
    "dynamic_span": DynamicSpan,
    "longformer": Longformer,
    "mixed": Mixed,
    "window": Window,
}

__all__ = [
    "ATTENTIONS",
    "AdaptiveSpan",
    "Attention",
    "DynamicSpan",
    "Longformer",
    "Mixed",
    "View",
    "Window",
    "read_spans",
]
