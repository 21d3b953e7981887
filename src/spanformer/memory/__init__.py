"""Segment memory for training, and KV caches for decoding."""

from spanformer.memory.base import ByHead, HeadPart, LayerCall, LayerMemory, MemoryShape, OwnMemory
from spanformer.memory.cache import Cache
from spanformer.memory.head_cache import HeadCache
from spanformer.memory.hidden_states import HiddenStates
from spanformer.memory.persistent import Persistent
from spanformer.memory.recurrent import Recurrence, Recurrent, empty_rows
from spanformer.memory.slots import read_positions
from spanformer.memory.source import Source
from spanformer.memory.state import State

__all__ = [
    "ByHead", "Cache", "HeadCache", "HeadPart", "HiddenStates", "LayerCall", "LayerMemory", "MemoryShape", "OwnMemory",
    "Persistent", "Recurrence", "Recurrent", "Source", "State", "empty_rows",
    "read_positions",
]  # fmt: skip
