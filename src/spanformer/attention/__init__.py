"""Attention mechanisms: each returns a rule for its heads. `spanformer.kinds` has their names and parameters."""

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.attention.base import Attention, Choices, View, remembers_itself
from spanformer.attention.big_bird import BigBird
from spanformer.attention.blockwise import Blockwise
from spanformer.attention.chunked import Chunked
from spanformer.attention.compressive import Compressive
from spanformer.attention.cross import Cross
from spanformer.attention.dilated import DilatedWindow
from spanformer.attention.dynamic_span import DynamicSpan
from spanformer.attention.etc import GlobalLocal
from spanformer.attention.expire_span import ExpireSpan
from spanformer.attention.forgetting import Forgetting
from spanformer.attention.full import Full
from spanformer.attention.gated_delta import GatedDelta
from spanformer.attention.gated_linear import GatedLinear
from spanformer.attention.hard import Hard
from spanformer.attention.image_local import ImageLocal1D, ImageLocal2D
from spanformer.attention.indexed import Indexed
from spanformer.attention.linear import LinearAttention
from spanformer.attention.linformer import Linformer
from spanformer.attention.longformer import Longformer
from spanformer.attention.low_rank import LowRank
from spanformer.attention.lsh import LSH
from spanformer.attention.memorizing import Memorizing
from spanformer.attention.mixed import Mixed
from spanformer.attention.mixed_memory import MixedMemory, mix, new_memory
from spanformer.attention.patterned import Patterned
from spanformer.attention.performer import Performer
from spanformer.attention.recurrent import RecurrentAttention
from spanformer.attention.retention import Retention
from spanformer.attention.retrieval import Retrieval
from spanformer.attention.rfa import RFA, GatedRFA
from spanformer.attention.routing import Routing
from spanformer.attention.scoring import Additive, Bilinear, Dot, General
from spanformer.attention.sinkhorn import Sinkhorn
from spanformer.attention.sinks import Sinks
from spanformer.attention.span_linear import SpanLinear
from spanformer.attention.sparse import FixedSparse, StridedSparse
from spanformer.attention.window import Window

__all__ = [
    "LSH",
    "RFA",
    "AdaptiveSpan",
    "Additive",
    "Attention",
    "BigBird",
    "Bilinear",
    "Blockwise",
    "Choices",
    "Chunked",
    "Compressive",
    "Cross",
    "DilatedWindow",
    "Dot",
    "DynamicSpan",
    "ExpireSpan",
    "FixedSparse",
    "Forgetting",
    "Full",
    "GatedDelta",
    "GatedLinear",
    "GatedRFA",
    "General",
    "GlobalLocal",
    "Hard",
    "ImageLocal1D",
    "ImageLocal2D",
    "Indexed",
    "LinearAttention",
    "Linformer",
    "Longformer",
    "LowRank",
    "Memorizing",
    "Mixed",
    "MixedMemory",
    "Patterned",
    "Performer",
    "RecurrentAttention",
    "Retention",
    "Retrieval",
    "Routing",
    "Sinkhorn",
    "Sinks",
    "SpanLinear",
    "StridedSparse",
    "View",
    "Window",
    "mix",
    "new_memory",
    "read_spans",
    "remembers_itself",
]
