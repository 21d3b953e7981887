"""Spec of blockwise attention."""

from types import SimpleNamespace

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import Kind


def _cached(n: int, p: SimpleNamespace) -> int:
    """Keys from a block to the block that the permutation maps it to, in either direction."""
    shift = p.shift % p.blocks
    return p.size * (max(shift, p.blocks - shift) + 1 if shift else 1)


KIND = Kind(
    "blockwise",
    "one of `blocks` blocks of `size` keys, by a permutation of the head's own",
    "spanformer.attention.blockwise:Blockwise.build",
    params={"blocks": 4, "size": 64},
    cost=Cost(
        "size",
        lambda n, causal, p: pairs.blockwise(n, causal, p.blocks, p.size, p.shift),
        _cached,
        assumed={"shift": 0},  # by which the head's permutation shifts blocks
    ),
    drawn="2 blockwise(4, 12)",
    timed="blockwise(4, 1024)",
    tested=("blockwise(3, 4)",),
)
