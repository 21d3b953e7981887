"""Specs of heads that retrieve: the own block, a ring before it, and the k best of a memory before that."""

from types import SimpleNamespace

from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind

INDEX = 16
"""bytes of a token's position and document"""
SCALE = 4
"""bytes of the scale of a key's code"""


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    """Read exactly, and retrieved; the search scans codes beside."""
    total, behind = 0, p.ring // p.block
    whole, rest = divmod(n, p.block)
    for b in range(whole + (rest > 0)):
        size = p.block if b < whole else rest
        stored = min(max(0, b - behind) * p.block, p.memory)
        total += size * (size + 1) // 2 + size * (min(b, behind) * p.block + min(p.k, stored))
    return total


def _scan(s: Sizes, p: SimpleNamespace) -> int:
    """Products of integers: every query with the codes of all that is stored."""
    total = 0
    for b in range(-(-s.length // p.block)):
        stored = min(max(0, b - p.ring // p.block) * p.block, p.memory)
        total += min(p.block, s.length - b * p.block) * stored
    return 2 * s.heads * s.head_dim * total


def _held(s: Sizes, p: SimpleNamespace) -> int:
    """Bytes of one text: keys and values of the ring and of the store, and codes of the store's keys."""
    ring, key = p.ring + p.block, s.groups * s.head_dim
    raw = ring * key if hasattr(p, "unit") else 0
    codes = p.memory * s.groups * (s.head_dim + SCALE) + 8 * s.groups
    return s.item * (2 * (ring + p.memory) * key + raw) + codes + INDEX * (ring + p.memory)


def _cost(keys: str) -> Cost:
    return Cost(keys, _pairs, lambda n, p: n, forward=_scan, held=_held)


KINDS = (
    Kind(
        "memorizing",
        "its block, the `ring` tokens before it, and the `k` best of a memory before those (Memorizing Transformer)",
        "spanformer.attention.memorizing:Memorizing.build",
        params={"memory": 8192, "k": 32, "ring": 128, "block": 128, "weight": "gate", "unit": True},
        choices={"weight": ("gate", "joint")},
        cost=_cost("block/2 + ring + k"),
        drawn="2 memorizing(64, 2, 8, 8)",
        timed="",
        tested=("memorizing(12, 3, 4, 4)", "memorizing(8, 2, 4, 4, joint)", "memorizing(12, 5, 6, 3, gate, false)"),
    ),
    Kind(
        "retrieval",
        "its block, the `ring` tokens before it, and the `k` best of all `memory` tokens before those",
        "spanformer.attention.retrieval:Retrieval.build",
        params={"ring": 128, "k": 64, "memory": 8192, "block": 64},
        cost=_cost("block/2 + ring + k"),
        drawn="2 retrieval(8, 2, 64, 8)",
        timed="",
        tested=("retrieval(4, 3, 12, 4)", "retrieval(6, 40, 12, 3)"),
    ),
)
