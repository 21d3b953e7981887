"""Attention maps of heads whose memory reads a text block by block (memory/blocks.py), of a whole text from its start.

Compressed slots count as the token whose position they have; what is retrieved is found again, among all older keys.
Shapes: H heads, Hkv key/value heads, T tokens, t of a piece, n keys, D head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.attention import Attention, Compressive, Retrieval
from spanformer.ops import Attended


class PieceSeen(NamedTuple):
    """What a mechanism was called with for one piece of a text, and its weights."""

    q: Tensor
    """[1, heads, t, D]"""
    k: Tensor
    """[1, heads, n, D]"""
    view: Any
    weights: Attended
    """[1, heads, t, n] and lse"""


def block_map(mechanism: Attention, pieces: list[PieceSeen], kv_heads: int, raw: dict[str, Tensor]) -> Attended:
    """[1, H, T, T] and lse [1, H, T]. raw: queries and keys without positions, of heads that retrieve."""
    groups, tokens = _groups(mechanism, kv_heads), 1 + max(int(p.view.q_positions.max()) for p in pieces)
    like = pieces[0].weights.out
    found = like.new_zeros(1, mechanism.heads, tokens, tokens)
    lse = like.new_full((1, mechanism.heads, tokens), -math.inf)
    for n, piece in enumerate(pieces):
        heads, rows = groups[n % len(groups)], piece.view.q_positions[0]
        at = piece.view.k_positions[0].expand(len(heads), len(rows), -1)
        some = found[0, heads][:, rows].scatter_add(2, at, piece.weights.out[0])
        found[0, torch.tensor(heads)[:, None], rows] = some
        lse[0, torch.tensor(heads)[:, None], rows] = piece.weights.lse[0]
    near = Attended(found, lse)
    if not isinstance(mechanism, Retrieval):
        return near
    q, k = (raw["q"], raw["k"]) if raw else _encoded(pieces, tokens)
    return mechanism.combine(near, _retrieved(mechanism, q, k), None)


def _groups(mechanism: Attention, kv_heads: int) -> list[list[int]]:
    """Query heads of each call for a piece, in order."""
    shared = mechanism.heads // kv_heads
    far = mechanism.far_heads(kv_heads) if isinstance(mechanism, Compressive) else ()
    near = [g for g in range(kv_heads) if g not in far]
    return [[g * shared + n for g in some for n in range(shared)] for some in (near, far) if some]


def _encoded(pieces: list[PieceSeen], tokens: int) -> tuple[Tensor, Tensor]:
    """Queries and keys with their positions, of all tokens."""
    (_, h, _, d), hkv = pieces[0].q.shape, pieces[0].k.shape[1]
    q, k = pieces[0].q.new_zeros(1, h, tokens, d), pieces[0].k.new_zeros(1, hkv, tokens, d)
    for piece in pieces:
        q[:, :, piece.view.q_positions[0]] = piece.q
        k[:, :, piece.view.k_positions[0]] = piece.k
    return q, k


def _retrieved(m: Retrieval, q: Tensor, k: Tensor) -> Attended:
    at = torch.arange(q.shape[2], device=q.device)
    first = (at // m.block * m.block - m.ring)[:, None]
    hidden = (at >= first) | (at < first - m.memory)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(hidden, -math.inf)
    best = scores.topk(min(m.k, len(at)), dim=3)
    lse = best.values.logsumexp(3)
    weights = (best.values - torch.where(lse == -math.inf, 0, lse)[..., None]).exp()
    return Attended(torch.zeros_like(scores).scatter(3, best.indices, weights), lse)
