"""Attention mechanisms, by name: each says what its heads may see."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View
from spanformer.attention.big_bird import BigBird
from spanformer.attention.blockwise import Blockwise
from spanformer.attention.dilated import DilatedWindow
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.full import Full
from spanformer.attention.image_local import ImageLocal1D, ImageLocal2D
from spanformer.attention.longformer import Longformer
from spanformer.attention.mixed import Mixed
from spanformer.attention.patterned import Patterned
from spanformer.attention.sparse import FixedSparse, StridedSparse
from spanformer.attention.window import Window

ATTENTIONS = {
    "adaptive_span": AdaptiveSpan,
    "big_bird": BigBird,
    "blockwise": Blockwise,
    "dilated": DilatedWindow,
    "dynamic_span": DynamicSpan,
    "fixed": FixedSparse,
    "full": Full,
    "image_1d": ImageLocal1D,
    "image_2d": ImageLocal2D,
    "mixed": Mixed,
    "pattern": Patterned,
    "strided": StridedSparse,
    "longformer": Longformer,
    "window": Window,
}

__all__ = [
    "ATTENTIONS",
    "AdaptiveSpan",
    "Attention",
    "BigBird",
    "Blockwise",
    "DilatedWindow",
    "DynamicSpan",
    "FixedSparse",
    "Full",
    "ImageLocal1D",
    "ImageLocal2D",
    "Longformer",
    "Mixed",
    "Patterned",
    "StridedSparse",
    "View",
    "Window",
    "read_spans",
]
