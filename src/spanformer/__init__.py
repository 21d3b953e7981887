"""spanformer: attention heads that learn how far to look, and cost only that much."""

from spanformer.attention import AdaptiveSpan, DynamicSpan
from spanformer.ops import Attended, BlockIndex, Rings, Rule, attend, attend_rings, backends, choose_backend, merge

__version__ = "0.1.0"
__all__ = [
    "AdaptiveSpan",
    "Attended",
    "BlockIndex",
    "DynamicSpan",
    "Rings",
    "Rule",
    "attend",
    "attend_rings",
    "backends",
    "choose_backend",
    "merge",
]
