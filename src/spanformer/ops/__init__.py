"""The attention operation: its description (Rule), its backends, and merging by lse."""

from spanformer.ops.attend import attend, backends, choose_backend
from spanformer.ops.attended import Attended
from spanformer.ops.blocks import BlockIndex
from spanformer.ops.decode.rings import Rings, attend_rings
from spanformer.ops.head_groups import AnyRule, HeadGroups
from spanformer.ops.linear.call import Divide, LinearState
from spanformer.ops.linear.delta import attend_delta
from spanformer.ops.linear.gated import attend_gated
from spanformer.ops.linear.linear import attend_far, attend_linear, sum_linear
from spanformer.ops.merge import merge
from spanformer.ops.rule import Rule
from spanformer.ops.union import Union

__all__ = [
    "AnyRule", "Attended", "BlockIndex", "Divide", "HeadGroups", "LinearState", "Rings", "Rule", "Union", "attend",
    "attend_delta", "attend_far", "attend_gated", "attend_linear", "attend_rings", "backends", "choose_backend",
    "merge", "sum_linear",
]  # fmt: skip
