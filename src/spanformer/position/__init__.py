"""Position encodings, by name."""

from spanformer.position.alibi import Alibi
from spanformer.position.base import Places, Position
from spanformer.position.distance_bias import DistanceBias
from spanformer.position.rotary import Rotary
from spanformer.position.table import Table

POSITIONS = {"none": Position, "rotary": Rotary, "alibi": Alibi, "distance_bias": DistanceBias, "table": Table}

__all__ = ["POSITIONS", "Alibi", "DistanceBias", "Places", "Position", "Rotary", "Table"]
