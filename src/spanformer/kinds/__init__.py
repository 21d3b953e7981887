"""One spec per attention mechanism and position encoding, without torch. The command line, `train`, `cost`, `show`,
`compare`, the gallery, the compatibility table and the product test read these specs.
"""

from spanformer.kinds.registry import KINDS, POSITIONS, Registry
from spanformer.kinds.spec import INHERIT, HeadSpec, Kind, PositionKind, PositionSpec, Section

register = KINDS.register
register_position = POSITIONS.register

__all__ = [
    "INHERIT", "KINDS", "POSITIONS", "HeadSpec", "Kind", "PositionKind", "PositionSpec", "Registry", "Section",
    "register", "register_position",
]  # fmt: skip
