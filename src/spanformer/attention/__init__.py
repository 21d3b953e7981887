"""Attention mechanisms: each returns a rule for its heads. `spanformer.kinds` has their names and parameters."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, View, remembers_itself
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
from spanformer.attention.lsh import LSH
from spanformer.attention.mixed import Mixed
from spanformer.attention.mixed_memory import MixedMemory, mix, new_memory
from spanformer.attention.patterned import Patterned
from spanformer.attention.routing import Routing
from spanformer.attention.scoring import Additive, Bilinear, Dot, General
from spanformer.attention.sinks import Sinks
from spanformer.attention.sparse import FixedSparse, StridedSparse
from spanformer.attention.window import Window

__all__ = [
    "LSH",
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
    "MixedMemory",
    "Patterned",
    "Routing",
    "Sinks",
    "StridedSparse",
    "View",
    "Window",
    "mix",
    "new_memory",
    "read_spans",
    "remembers_itself",
]
