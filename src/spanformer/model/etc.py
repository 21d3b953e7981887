"""An encoder of long, structured inputs: ETC (Ainslie et al., 2020), https://arxiv.org/abs/2004.08483

Two streams through the same layers: the tokens of a text, and a few global tokens, for instance one for each sentence
(attention/etc.py says who sees whom). Positions are told by relative labels alone, so any length can be read.

Shapes: B batch, n long tokens, m global ones, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from spanformer.attention.etc import GlobalLocal, Projected, Structure
from spanformer.model.embedding import Embedding, Head
from spanformer.model.feedforward import FeedForward
from spanformer.model.layer import split_heads
from spanformer.model.linear import Linear
from spanformer.model.norm import make_norm
from spanformer.ops import Attended

PARTS = ("l2l", "l2g", "g2g", "g2l")


class Encoded(NamedTuple):
    long: Tensor
    """[B, n, dim]"""
    top: Tensor
    """[B, m, dim], of the global tokens"""


class ETCLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), for both streams.

    shared: both streams and all four parts use the same projections, as in the paper's models that start from
    BERT's; else each stream has queries and an output of its own, and each part keys and values.
    """

    def __init__(self, dim: int, attention: GlobalLocal, feedforward: FeedForward, shared: bool) -> None:
        super().__init__()
        self.heads, self.shared = attention.heads, shared
        streams, parts = (("long",), ("l2l",)) if shared else (("long", "top"), PARTS)
        self.query, self.out = _products(dim, streams), _products(dim, streams)
        self.key, self.value = _products(dim, parts), _products(dim, parts)
        self.attention, self.feedforward = attention, feedforward
        self.norm1, self.norm2 = make_norm("layer", dim), make_norm("layer", dim)

    def forward(self, h: Encoded, structure: Structure) -> Encoded:
        long, top = self.norm1(h.long), self.norm1(h.top)
        found = self.attention(self._project(long, top), structure)
        parts = zip(h, found, ("long", "long" if self.shared else "top"), strict=True)
        return Encoded(*(self._feed(x + self.out[stream](_rows(new))) for x, new, stream in parts))

    def _project(self, long: Tensor, top: Tensor) -> Projected:
        if self.shared:
            q, k, v = self.query["long"], self.key["l2l"], self.value["l2l"]
            of_long, of_top = ((self._split(k(x)), self._split(v(x))) for x in (long, top))
            return Projected(self._split(q(long)), self._split(q(top)), of_long, of_top, of_top, of_long)
        q_long, q_top = self._split(self.query["long"](long)), self._split(self.query["top"](top))
        pairs = []
        for part in PARTS:
            x = long if part.endswith("l") else top
            pairs.append((self._split(self.key[part](x)), self._split(self.value[part](x))))
        return Projected(q_long, q_top, *pairs)

    def _split(self, x: Tensor) -> Tensor:
        return split_heads(x, self.heads)

    def _feed(self, x: Tensor) -> Tensor:
        return x + self.feedforward(self.norm2(x))[0]


class ETC(nn.Module):
    """`etc(x, segments, top)` reads token ids x [B, n] and global token ids top [B, m]; segments [B, n] says which
    global token each token belongs to, −1 for none. Global ids are numbered apart from the vocabulary: by default there
    is one kind, 0, the summary of a segment."""

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        heads: int,
        radius: int,
        *,
        clip: int = 12,
        hidden: int = 0,
        global_vocab: int = 1,
        shared: bool = True,
        hard_g2l: bool = False,
        dropout: float = 0.0,
    ) -> None:
        """radius: long tokens see each other this far to either side. clip: farther than this, distances have one
        label. hidden: of the feed-forward, 4 · dim unless given. dropout: of attention weights and inner
        activations."""
        super().__init__()
        if vocab < 1 or global_vocab < 1 or layers < 1:
            raise ValueError(
                f"vocab is {vocab}, global_vocab {global_vocab} and layers {layers}; expected at least 1 each"
            )
        if heads < 1 or dim < 1 or dim % heads:
            raise ValueError(f"dim is {dim}; expected a multiple of heads, {heads}")
        self.embedding, self.global_embedding = Embedding(vocab, dim), Embedding(global_vocab, dim)
        for table in (self.embedding, self.global_embedding):  # the head is tied: N(0, 1) would begin far too certain
            nn.init.normal_(table.weight, std=dim**-0.5)
        self.layers = nn.ModuleList(
            ETCLayer(
                dim,
                GlobalLocal(heads, dim // heads, radius, clip=clip, hard_g2l=hard_g2l, dropout=dropout),
                FeedForward(dim, hidden or 4 * dim, kind="gelu", bias=True, dropout=dropout),
                shared,
            )
            for _ in range(layers)
        )
        self.norm = make_norm("layer", dim)
        self.head = Head(vocab, dim, bias=True, tied_to=self.embedding)
        """the masked-token head, see `guess`"""

    def forward(
        self,
        x: Tensor,
        segments: Tensor,
        top: Tensor,
        *,
        padding: Tensor | None = None,
        global_padding: Tensor | None = None,
    ) -> Encoded:
        """x [B, n] and top [B, m] ids, segments [B, n]; padding [B, n] and global_padding [B, m] bool, True where
        there is no token."""
        for name, ids in (("x", x), ("top", top)):
            if ids.ndim != 2 or ids.is_floating_point() or ids.shape[0] != x.shape[0]:
                raise ValueError(
                    f"{name} has shape {list(ids.shape)} and dtype {ids.dtype}; expected ids, one row for each of "
                    f"the {x.shape[0]} texts"
                )
        structure = Structure(segments, padding, global_padding)
        h = Encoded(self.embedding(x), self.global_embedding(top))
        for layer in self.layers:
            h = layer(h, structure)
        return Encoded(self.norm(h.long), self.norm(h.top))

    def guess(self, long: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        """The masked-token objective: long [B, n, dim] of a text in which some tokens were masked, at [B, N] where, and
        what stood there → [B, N], −log p of each."""
        if at.ndim != 2 or at.shape != targets.shape or len(at) != len(long):
            raise ValueError(
                f"at has shape {list(at.shape)} and targets {list(targets.shape)}; expected [{len(long)}, N] both"
            )
        return self.head.nll(long.gather(1, at[..., None].expand(-1, -1, long.shape[2])), targets)


def _products(dim: int, names: tuple[str, ...]) -> nn.ModuleDict:
    return nn.ModuleDict({name: Linear(dim, dim, bias=False) for name in names})


def _rows(found: Attended) -> Tensor:
    """[B, H, T, D] → [B, T, H · D]"""
    out = found.out.transpose(1, 2)
    return torch.flatten(out, 2)
