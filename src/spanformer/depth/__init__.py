"""How many layers each token runs through: halting (ACT) and exits."""

from spanformer.depth.act import ACT, Pondering
from spanformer.depth.base import DepthRun

__all__ = ["ACT", "DepthRun", "Pondering"]
