"""Position encodings. `spanformer.kinds` has their names."""

from spanformer.position.absolute import Learned, Sinusoidal, SinusoidalPerLayer
from spanformer.position.alibi import Alibi
from spanformer.position.base import Encode, Places, Position
from spanformer.position.da_transformer import DATransformer
from spanformer.position.distance_bias import DistanceBias
from spanformer.position.log_scaled import LogScaled
from spanformer.position.rotary import Rotary
from spanformer.position.shaw import Shaw
from spanformer.position.t5 import T5
from spanformer.position.table import Table
from spanformer.position.transformer_xl import TransformerXL

__all__ = [
    "T5",
    "Alibi",
    "DATransformer",
    "DistanceBias",
    "Encode",
    "Learned",
    "LogScaled",
    "Places",
    "Position",
    "Rotary",
    "Shaw",
    "Sinusoidal",
    "SinusoidalPerLayer",
    "Table",
    "TransformerXL",
]  # fmt: skip
