"""The keys that an index ranks highest for each query.

    I_ij = Σ_n w_in · relu(a_in·c_j)        n = 1 … J heads of the index        S_i = the `most` keys of largest I_ij

Equal tokens have equal codes, so equal scores are common, and which key wins must not depend on how a text is read.
Therefore a and c have 8 bits (`coarse`): their products are exact in float32, in any order of summation. Scores are
compared in float32; of equal ones the later key ranks higher, and NaN ranks lowest. A block of queries meets a block of
keys at a time, and only each query's best keys so far are kept, so nothing of size Tq × Tk is built.
Shapes: B batch, Tq queries, Tk keys, J heads and E numbers of the index, K chosen keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128, 1024
"""queries and keys that meet at a time"""
NONE = torch.iinfo(torch.int64).min
LARGEST = 1024
"""the largest E: float32 holds a sum of this many products of 8-bit numbers exactly"""


@dataclass(frozen=True)
class Sight:
    """What queries may see: positions, documents, and keys that are hidden from all."""

    q_positions: Tensor
    """[1 or B, Tq]"""
    k_positions: Tensor
    """[1 or B, Tk]"""
    reach: int
    causal: bool = True
    ordered: bool = True
    """whether keys are in the order of their positions, and queries the last of them"""
    documents: tuple[Tensor, Tensor] | None = None
    """[B, Tq] and [B, Tk]"""
    hidden: Tensor | None = None
    """[B, Tk] bool"""

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """[1 or B, queries, keys]"""
        d = self.q_positions[:, queries, None] - self.k_positions[:, None, keys]
        seen = (d >= 0) & (d < self.reach) if self.causal else d.abs() < self.reach
        if self.documents is not None:
            seen = seen & (self.documents[0][:, queries, None] == self.documents[1][:, None, keys])
        return seen if self.hidden is None else seen & ~self.hidden[:, None, keys]

    def keys_of(self, queries: slice) -> range:
        """Where blocks of keys begin that these queries may see."""
        tq, tk = self.q_positions.shape[1], self.k_positions.shape[1]
        first, last = 0, tk
        if self.causal:  # what a memory holds comes before the new keys
            last = min(last, queries.stop + tk - tq)
        if self.ordered:
            first = max(0, queries.start + tk - tq - self.reach + 1)
            last = last if self.causal else min(last, queries.stop + tk - tq + self.reach - 1)
        return range(first, last, BLOCK[1])


def coarse(x: Tensor) -> Tensor:
    """x [..., E] as whole multiples, up to 128, of a power of 2 for each vector. The gradient passes through."""
    _, exponent = torch.frexp(x.detach().abs().amax(-1, keepdim=True))  # the largest is below 2^exponent
    near = torch.ldexp(torch.ldexp(x.detach(), 7 - exponent).round(), exponent - 7)
    return near if not x.requires_grad else x + (near - x.detach())


def index_scores(a: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """a [B, T, J, E], c [B, N, E], w [B, T, J] → [B, T, N]"""
    each = (a.flatten(1, 2) @ c.transpose(1, 2)).relu_().unflatten(1, a.shape[1:3])
    total = w[:, :, 0, None] * each[:, :, 0]
    for n in range(1, a.shape[2]):  # one by one: a product with w would round by its place in a row of keys
        total = total + w[:, :, n, None] * each[:, :, n]
    return total


@torch.no_grad()
def choose_keys(a: Tensor, c: Tensor, w: Tensor, sight: Sight, most: int) -> Tensor:
    """[B, Tq, K] int32, K = min(most, Tk): the chosen keys of each query, best first; −1 where it sees fewer."""
    (b, tq, _, _), tk = a.shape, c.shape[1]
    found = torch.full((b, tq, min(most, tk)), -1, dtype=torch.int32, device=a.device)
    for start in range(0, tq, BLOCK[0]):
        queries = slice(start, min(start + BLOCK[0], tq))
        best = torch.full((b, queries.stop - start, 0), NONE, device=a.device)
        at = best
        for first in (blocks := sight.keys_of(queries)):
            keys = slice(first, min(first + BLOCK[1], blocks.stop))
            score = index_scores(a[:, queries], c[:, keys], w[:, queries])
            packed = _packed(score, sight.k_positions[:, None, keys])
            packed = torch.where(sight.visible(queries, keys), packed, NONE)
            best = torch.cat([best, packed], 2)
            at = torch.cat([at, torch.arange(first, keys.stop, device=at.device).expand(packed.shape)], 2)
            best, order = best.topk(min(found.shape[2], best.shape[2]), 2)
            at = at.gather(2, order)
        found[:, queries, : at.shape[2]] = torch.where(best == NONE, -1, at).to(torch.int32)
    return found


def _packed(score: Tensor, positions: Tensor) -> Tensor:
    """Score and position in one integer, of which no two are equal: the order of floats is that of their bits, but for
    the sign."""
    bits = (score.float().nan_to_num(-math.inf, math.inf, -math.inf) + 0.0).view(torch.int32)  # −0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 31) + (positions & 0x7FFFFFFF)
