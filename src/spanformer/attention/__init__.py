"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.expire_span import ExpireSpan
from spanformer.attention.forgetting import Forgetting
from spanformer.attention.mixed import Mixed
from spanformer.attention.sinks import Sinks
from spanformer.attention.window import Window

ATTENTIONS = {
    "adaptive_span": AdaptiveSpan,
    "dynamic_span": DynamicSpan,
    "expire_span": ExpireSpan,
    "forgetting": Forgetting,
    "mixed": Mixed,
    "sinks": Sinks,
    "window": Window,
}

__all__ = [
    "ATTENTIONS",
    "AdaptiveSpan",
    "Attention",
    "DynamicSpan",
    "ExpireSpan",
    "Forgetting",
    "Mixed",
    "Sinks",
    "View",
    "Window",
    "read_spans",
]
