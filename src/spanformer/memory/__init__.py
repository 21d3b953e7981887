"""What a model remembers beyond the tokens in front of it."""

from spanformer.memory.cache import Cache
from spanformer.memory.head_cache import HeadCache
from spanformer.memory.persistent import Persistent
from spanformer.memory.segment import State
from spanformer.memory.source import Source

__all__ = ["Cache", "HeadCache", "Persistent", "Source", "State"]
