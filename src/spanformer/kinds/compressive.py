"""Spec of the Compressive Transformer's attention: a block, tokens before it, and compressed slots before those."""

from types import SimpleNamespace

from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind

INDEX = 16
"""bytes of a token's position and document"""


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    total, behind, per_block = 0, p.memory // p.block, p.block // p.ratio
    whole, rest = divmod(n, p.block)
    full = p.block * (p.block + 1) // 2
    steady = behind + p.slots // per_block  # from this block on, all see as much
    for b in range(min(whole, steady)):
        total += full + p.block * _before(b, p)
    total += max(0, whole - steady) * (full + p.block * (p.memory + p.slots))
    return total + rest * (rest + 1) // 2 + rest * _before(whole, p)


def _before(b: int, p: SimpleNamespace) -> int:
    """Keys before block b that its tokens see."""
    behind = p.memory // p.block
    return min(b, behind) * p.block + min(max(0, b - behind) * (p.block // p.ratio), p.slots)


def _compression(s: Sizes, p: SimpleNamespace) -> int:
    """Convolutions of all tokens but the last, and projections of the slots, each time that a block sees them."""
    blocks = s.length // p.block
    left = max(0, blocks - p.memory // p.block) * p.block
    taps = {"conv": 1, "dilated": 7}.get(p.compress, 0)
    seen = sum(_before(b, p) - min(b, p.memory // p.block) * p.block for b in range(-(-s.length // p.block)))
    return 2 * left * taps * s.dim**2 + 2 * seen * s.dim * 2 * s.groups * s.head_dim


def _held(s: Sizes, p: SimpleNamespace) -> int:
    """Bytes of one text: hidden states of the ring, keys and values of ring and slots."""
    ring = p.memory + p.block
    usage = 8 * ring if p.compress == "most_used" else 0
    keys = 2 * (ring + p.slots) * s.groups * s.head_dim
    return s.item * (ring * s.dim + keys) + INDEX * (ring + p.slots) + usage


KIND = Kind(
    "compressive",
    "its block, the `memory` tokens before it, and `slots` compressed ones before those",
    "spanformer.attention.compressive:Compressive.build",
    params={
        "block": 128,
        "memory": 128,
        "slots": 128,
        "ratio": 4,
        "compress": "conv",
        "loss": "attention",
        "learned": False,
    },
    choices={"compress": ("mean", "max", "conv", "dilated", "most_used"), "loss": ("attention", "autoencode")},
    cost=Cost(
        "block/2 + memory + slots",
        _pairs,
        lambda n, p: n,
        extra=_compression,
        held=_held,
    ),
    drawn="compressive(8, 8, 8, 2, mean)",
    timed="",
    tested=(
        "compressive(4, 4, 4, 2)",
        "compressive(3, 6, 3, 3, mean)",
        "compressive(4, 4, 4, 2, most_used)",
        "compressive(6, 6, 3, 2, max, learned=true)",
    ),
)
