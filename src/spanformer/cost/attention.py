"""The minimum cost of attention: pairs, floating-point operations, bytes.

A head of reach r sees the distances d = 0 … r − 1, so a query at position i sees min(i + 1, r) keys. One query–key
pair costs, with head size D (a multiply and an add are two operations):

    forward   q·k and p·v                             2 products   4·D
    backward  q·k again, do·v, and into dq, dk, dv    5 products  10·D

The softmax is not counted: it is overhead beyond this minimum.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD = 4, 10
PER_PAIR = {"forward": FORWARD, "backward": BACKWARD, "forward+backward": FORWARD + BACKWARD, "decode": FORWARD}


def head_pairs(reach: int, queries: int, keys: int) -> int:
    """Number of pairs that one causal head of this reach sees; its queries are the last tokens of the keys."""
    if reach < 0 or queries < 0 or keys < queries:
        raise ValueError(f"reach {reach}, queries {queries}, keys {keys}; expected 0 ≤ queries ≤ keys and a reach ≥ 0")
    first = keys - queries  # the position of the first query
    rising = max(0, min(keys, reach) - first)  # queries that see every key up to themselves
    return rising * first + rising * (rising + 1) // 2 + (queries - rising) * min(reach, keys)


def pairs(reaches: Sequence[int], queries: int, keys: int | None = None) -> int:
    """Number of pairs that all heads see; keys: default is queries."""
    return sum(head_pairs(reach, queries, queries if keys is None else keys) for reach in reaches)


def flops(reaches: Sequence[int], queries: int, dim: int, *, mode: str, batch: int = 1, keys: int | None = None) -> int:
    """Operations of one call. mode: "forward", "backward", "forward+backward" or "decode"."""
    if mode not in PER_PAIR:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(PER_PAIR)}")
    return PER_PAIR[mode] * dim * batch * pairs(reaches, queries, keys)


def qkv_bytes(
    *, batch: int, heads: int, queries: int, dim: int, item: int, keys: int | None = None, kv_heads: int | None = None
) -> int:
    """Bytes of q, k and v together; item: bytes of one number."""
    keys, kv_heads = queries if keys is None else keys, heads if kv_heads is None else kv_heads
    return item * dim * batch * (heads * queries + 2 * kv_heads * keys)


def cache_bytes(reaches: Sequence[int], length: int, *, dim: int, item: int, batch: int = 1) -> int:
    """Bytes of a KV cache after `length` tokens, if each KV head keeps as many tokens as it reaches."""
    return 2 * item * dim * batch * sum(min(reach, length) for reach in reaches)


def limit_seconds(operations: float, rate: float) -> float:
    """The minimum time of the operations at this rate (operations per second)."""
    if rate <= 0:
        raise ValueError(f"rate is {rate}; expected operations per second, more than 0")
    return operations / rate
