"""ETC: Encoding Long and Structured Inputs in Transformers (Ainslie et al., 2020). https://arxiv.org/abs/2004.08483

    e_ij = q_i·(k_j + P[label_ij]) / √D − ∞·(1 − M_ij)        z_i = Σ_j softmax_j(e_ij)·v_j

Two inputs: a long one, and a few global tokens, for instance one for each sentence. Each token's softmax runs over long
and global tokens together; what it takes from either is one of four parts:

    l2l   |i − j| ≤ radius, labelled by the distance i − j, clipped to ±clip
    l2g   every global token, labelled by whether it is the one of i's own segment
    g2g   every global token, labelled by the clipped distance
    g2l   every long token (with hard_g2l only those of its segment), labelled by whether it is of its segment

Shapes: B batch, H heads, n long tokens, m global ones, D head size, N labels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.ops import Attended, Rule, attend, merge

KeysValues = tuple[Tensor, Tensor]


class Projected(NamedTuple):
    """Queries of both inputs, and keys and values for each part. Parts may share them."""

    q_long: Tensor
    """[B, H, n, D]"""
    q_global: Tensor
    """[B, H, m, D]"""
    l2l: KeysValues
    """[B, H, n, D] each, as of g2l"""
    l2g: KeysValues
    """[B, H, m, D] each, as of g2g"""
    g2g: KeysValues
    g2l: KeysValues


class Structure(NamedTuple):
    """How the two inputs hang together."""

    segments: Tensor
    """[B, n] integers: which global token is the one of this token's segment; −1: none"""
    long_padding: Tensor | None = None
    """[B, n] bool, True where there is no token"""
    global_padding: Tensor | None = None
    """[B, m] bool"""


class GlobalLocal(nn.Module):
    """ETC's attention. Labels' vectors start at zero: at first no pair is told apart."""

    backend: str = "auto"
    """of l2l; the other parts have m rows or columns and are computed densely"""

    def __init__(
        self, heads: int, head_dim: int, radius: int, *, clip: int = 12, hard_g2l: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or head_dim < 1:
            raise ValueError(f"heads is {heads} and head_dim {head_dim}; expected at least 1 each")
        if radius < 0 or clip < 0:
            raise ValueError(f"radius is {radius} and clip {clip}; expected numbers of tokens, 0 or more")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; expected a share of the weights, 0 … 1 without 1")
        self.heads, self.radius, self.clip, self.hard_g2l, self.dropout = heads, radius, clip, hard_g2l, dropout
        self.l2l = nn.Parameter(torch.zeros(heads, 2 * clip + 1, head_dim))
        """[H, 2·clip + 1, D]: row d + clip for distance d = i − j, as in g2g"""
        self.g2g = nn.Parameter(torch.zeros(heads, 2 * clip + 1, head_dim))
        self.l2g = nn.Parameter(torch.zeros(heads, 2, head_dim))
        """[H, 2, D]: row 1 for a pair of one segment, 0 for others, as in g2l"""
        self.g2l = nn.Parameter(torch.zeros(heads, 2, head_dim))

    def forward(self, given: Projected, structure: Structure) -> tuple[Attended, Attended]:
        """What the long tokens attend to, out [B, H, n, D] and lse [B, H, n], and the global ones, [B, H, m, ·]."""
        m = given.q_global.shape[2]
        _check(given, structure)
        own = structure.segments[..., None] == torch.arange(m, device=structure.segments.device)  # [B, n, m]
        no_token = None if structure.long_padding is None else structure.long_padding[:, None]  # [B, 1, n]
        no_global = None if structure.global_padding is None else structure.global_padding[:, None]
        far = ~own.mT if self.hard_g2l else None  # [B, m, n]
        if far is not None:
            no_token = far if no_token is None else far | no_token
        place = torch.arange(m, device=own.device)
        distance = (place[:, None] - place).clamp(-self.clip, self.clip) + self.clip
        long = merge(
            [self._local(given, structure), self._part(given.q_long, given.l2g, self.l2g, own.long(), no_global)]
        )
        top = merge(
            [
                self._part(given.q_global, given.g2g, self.g2g, distance[None], no_global),
                self._part(given.q_global, given.g2l, self.g2l, own.mT.long(), no_token),
            ]
        )
        return long, top

    def _local(self, given: Projected, structure: Structure) -> Attended:
        """l2l, by windows."""
        r = self.radius
        row = torch.arange(-r, r + 1, device=self.l2l.device).clamp(-self.clip, self.clip) + self.clip
        hidden = structure.long_padding
        bias = None if hidden is None else torch.zeros(hidden.shape, device=hidden.device)
        if bias is not None and hidden is not None:
            bias = bias.masked_fill(hidden, -math.inf)[:, None]
        rule = Rule(
            self.heads, causal=False, reach=r + 1, ahead=r, distance_vec=self.l2l.index_select(1, row), key_bias=bias
        )
        dropout = self.dropout if self.training else 0.0
        return attend(given.q_long, *given.l2l, rule, backend=self.backend, dropout=dropout)

    def _part(self, q: Tensor, kv: KeysValues, table: Tensor, labels: Tensor, hidden: Tensor | None) -> Attended:
        return labelled(q, *kv, table, labels, hidden, self.dropout if self.training else 0.0)

    def extra_repr(self) -> str:
        hard = ", hard_g2l=True" if self.hard_g2l else ""
        return f"heads={self.heads}, radius={self.radius}, clip={self.clip}{hard}"


def labelled(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, labels: Tensor, hidden: Tensor | None, dropout: float = 0.0
) -> Attended:
    """Dense attention whose every pair has a label: for a few queries, or a few keys.

    q [B, H, Tq, D], k and v [B, H, Tk, D], table [H, N, D], labels [1 or B, Tq, Tk] integers, hidden
    [B, 1 or Tq, Tk] bool. A row that sees nothing gives zeros and −inf.
    """
    told = (q @ table.to(q.dtype).mT).gather(3, labels[:, None].expand(*q.shape[:3], -1))
    score = (q @ k.mT + told) / math.sqrt(q.shape[3])
    if hidden is not None:
        score = score.masked_fill(hidden[:, None], -math.inf)
    lse = score.logsumexp(-1)
    weight = (score - torch.where(lse == -math.inf, 0, lse)[..., None]).exp()
    return Attended(F.dropout(weight, dropout) @ v, lse)


def _check(given: Projected, structure: Structure) -> None:
    (b, _, n, _), m = given.q_long.shape, given.q_global.shape[2]
    ids = structure.segments
    if ids.shape != (b, n) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"segments has shape {list(ids.shape)} and dtype {ids.dtype}; expected [{b}, {n}] integers, the number of "
            "each token's global token, −1 for none"
        )
    for name, padding, length in (
        ("long_padding", structure.long_padding, n),
        ("global_padding", structure.global_padding, m),
    ):
        if padding is not None and (padding.shape != (b, length) or padding.dtype != torch.bool):
            raise ValueError(
                f"{name} has shape {list(padding.shape)} and dtype {padding.dtype}; expected [{b}, {length}] of "
                "torch.bool, True where there is no token"
            )
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        lowest, highest = (int(i) for i in ids.aminmax())
        if lowest < -1 or highest >= m:
            wrong = lowest if lowest < -1 else highest
            raise ValueError(f"segments holds {wrong}; expected −1 … {m - 1}, as there are {m} global tokens")
