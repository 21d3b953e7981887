"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View
from spanformer.attention.big_bird import BigBird
from spanformer.attention.blockwise import Blockwise
from spanformer.attention.chunked import Chunked
from spanformer.attention.cross import Cross
from spanformer.attention.dilated import DilatedWindow
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.etc import GlobalLocal
from spanformer.attention.expire_span import ExpireSpan
from spanformer.attention.forgetting import Forgetting
from spanformer.attention.full import Full
from spanformer.attention.image_local import ImageLocal1D, ImageLocal2D
from spanformer.attention.longformer import Longformer
from spanformer.attention.mixed import Mixed
from spanformer.attention.patterned import Patterned
from spanformer.attention.scoring import Additive, Bilinear, Dot, General
from spanformer.attention.sinks import Sinks
from spanformer.attention.sparse import FixedSparse, StridedSparse
from spanformer.attention.window import Window

ATTENTIONS = {
    "adaptive_span": AdaptiveSpan,
    "additive": Additive,
    "big_bird": BigBird,
    "bilinear": Bilinear,
    "blockwise": Blockwise,
    "chunked": Chunked,
    "cross": Cross,
    "dilated": DilatedWindow,
    "dot": Dot,
    "dynamic_span": DynamicSpan,
    "etc": GlobalLocal,
    "expire_span": ExpireSpan,
    "fixed": FixedSparse,
    "forgetting": Forgetting,
    "full": Full,
    "general": General,
    "image_1d": ImageLocal1D,
    "image_2d": ImageLocal2D,
    "longformer": Longformer,
    "mixed": Mixed,
    "pattern": Patterned,
    "sinks": Sinks,
    "strided": StridedSparse,
    "window": Window,
}

__all__ = [
    "ATTENTIONS",
    "AdaptiveSpan",
    "Additive",
    "Attention",
    "BigBird",
    "Bilinear",
    "Blockwise",
    "Chunked",
    "Cross",
    "DilatedWindow",
    "Dot",
    "DynamicSpan",
    "ExpireSpan",
    "FixedSparse",
    "Forgetting",
    "Full",
    "General",
    "GlobalLocal",
    "ImageLocal1D",
    "ImageLocal2D",
    "Longformer",
    "Mixed",
    "Patterned",
    "Sinks",
    "StridedSparse",
    "View",
    "Window",
    "read_spans",
]
