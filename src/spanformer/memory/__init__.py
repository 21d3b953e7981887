"""What a model remembers beyond the tokens in front of it."""

from spanformer.memory.persistent import Persistent
from spanformer.memory.segment import State

__all__ = ["Persistent", "State"]
