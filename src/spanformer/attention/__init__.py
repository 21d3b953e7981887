"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import Attention, View
from spanformer.attention.dynamic_span import DynamicSpan

ATTENTIONS = {"adaptive_span": AdaptiveSpan, "dynamic_span": DynamicSpan}

__all__ = ["ATTENTIONS", "AdaptiveSpan", "Attention", "DynamicSpan", "View"]
