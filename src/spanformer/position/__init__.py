"""Position encodings, by name."""

from spanformer.position.absolute import Learned, Sinusoidal, SinusoidalPerLayer
from spanformer.position.alibi import Alibi
from spanformer.position.base import Places, Position, Turner
from spanformer.position.da_transformer import DATransformer
from spanformer.position.distance_bias import DistanceBias
from spanformer.position.rotary import Rotary
from spanformer.position.shaw import Shaw
from spanformer.position.t5 import T5
from spanformer.position.table import Table
from spanformer.position.transformer_xl import TransformerXL

POSITIONS = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "sinusoidal_per_layer": SinusoidalPerLayer,
    "learned": Learned,
    "learned_per_layer": Learned,
    "table": Table,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "rotary": Rotary,
    "alibi": Alibi,
    "t5": T5,
    "distance_bias": DistanceBias,
    "da_transformer": DATransformer,
}

__all__ = [
    "POSITIONS", "T5", "Alibi", "DATransformer", "DistanceBias", "Learned", "Places", "Position", "Rotary", "Shaw",
    "Sinusoidal", "SinusoidalPerLayer", "Table", "TransformerXL", "Turner",
]  # fmt: skip
