"""The attention operation: its description (Rule), its backends, and merging by lse."""

from spanformer.ops.apart import stand_apart
from spanformer.ops.attend import attend, backends, choose_backend
from spanformer.ops.blocks import BlockIndex
from spanformer.ops.call import Attended
from spanformer.ops.merge import merge
from spanformer.ops.rings import Rings, attend_rings
from spanformer.ops.rule import Rule

__all__ = [
    "Attended", "BlockIndex", "Rings", "Rule", "attend", "attend_rings", "backends", "choose_backend", "merge",
    "stand_apart",
]  # fmt: skip
