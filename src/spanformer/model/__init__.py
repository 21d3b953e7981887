"""Language models made of slots: attention, position, feed-forward, norm."""

from spanformer.memory import State
from spanformer.model.config import ModelConfig
from spanformer.model.lm import LM, LMOutput

__all__ = ["LM", "LMOutput", "ModelConfig", "State"]
