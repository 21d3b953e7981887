"""How many layers each token runs through: halting (ACT) and exits."""

from spanformer.depth.act import ACT, Pondering
from spanformer.depth.base import DepthRun
from spanformer.depth.confidence import Confidence
from spanformer.depth.exits import Exits, Targets

__all__ = ["ACT", "Confidence", "DepthRun", "Exits", "Pondering", "Targets"]
