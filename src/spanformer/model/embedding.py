"""Embedding and output layers: a plain table, and clusters for vocabularies of hundreds of thousands, where rare
words have short vectors and are scored only for targets among them.

Adaptive Input Representations for Neural Language Modeling (Baevski, Auli, 2018), https://arxiv.org/abs/1809.10853
Efficient softmax approximation for GPUs (Grave et al., 2016), https://arxiv.org/abs/1609.04309

    embedding:  x(w) = sqrt(dim) · P_i · e_i[w]                                  w in cluster i
    output:     log p(w) = log p_head(w)                                         w in cluster 0, the shortlist
                         = log p_head(cluster i) + log p_i(w | cluster i)        w in a later cluster, a tail
                p_i = softmax(W_i · P_iᵀ · h + b_i),  and the head has one more row for each tail

Words are numbered from the most frequent; cluster i holds ids cutoffs[i − 1] … cutoffs[i] − 1, in vectors of size
dim // divisorⁱ. All parameters start as in torch's layers.

Shapes: B batch, T tokens, N = B·T, V vocabulary, V_i and D_i words and vector size of cluster i, C clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.model.linear import Linear
from spanformer.model.recompute import by_chunks


class Embedding(nn.Embedding):
    """nn.Embedding whose error names the token that is outside the vocabulary."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__(vocab, dim)

    def forward(self, input: Tensor) -> Tensor:
        """ids [B, T] → [B, T, dim]"""
        _check_ids(input, self.num_embeddings)
        return super().forward(input)


class Head(Linear):
    """One softmax over all tokens; `tied_to`: an embedding whose weight [V, dim] it shares; chunk: see
    `EmbeddingConfig.loss_chunk`."""

    def __init__(
        self, vocab: int, dim: int, bias: bool, tied_to: nn.Embedding | None = None, chunk: int = 0
    ) -> None:  # fmt: skip
        super().__init__(dim, vocab, bias=bias)
        self.chunk = chunk
        if tied_to is not None:
            if tied_to.weight.shape != (vocab, dim):
                raise ValueError(
                    f"tied_to has shape {list(tied_to.weight.shape)}; expected [{vocab}, {dim}] as the output layer"
                )
            self.weight = tied_to.weight

    def logits(self, h: Tensor) -> Tensor:
        """h [B, T, dim] → [B, T, V], log-probabilities up to a constant."""
        return self(h)

    def nll(self, h: Tensor, targets: Tensor) -> Tensor:
        """h [B, T, dim], targets [B, T] → [B, T], −log p of each target, in float32 or wider."""
        _check_ids(targets, self.out_features)
        return by_chunks(self._nll, self.chunk, h.flatten(0, -2), targets.flatten()).view(targets.shape)

    def _nll(self, h: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(self(h), targets)


class Clusters(nn.Module):
    """The matrices of every cluster. An embedding and the output layer tied to it share them."""

    def __init__(self, vocab: int, dim: int, cutoffs: Sequence[int], divisor: int) -> None:
        super().__init__()
        bounds = [0, *cutoffs, vocab]
        if len(bounds) < 3 or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(
                f"cutoffs is {list(cutoffs)}; expected one or more increasing numbers between 0 and the vocabulary, "
                f"{vocab}"
            )
        if divisor < 2 or dim < divisor ** len(cutoffs):
            raise ValueError(
                f"divisor is {divisor}; expected at least 2, and so small that a dim of {dim} divided by it "
                f"{len(cutoffs)} times leaves the last cluster a vector"
            )
        sizes = [dim // divisor**i for i in range(len(bounds) - 1)]
        self.shape = (vocab, dim, tuple(cutoffs), divisor)
        self.vocab, self.dim, self.bounds = vocab, dim, bounds
        self.weights = nn.ParameterList(
            torch.randn(high - low, size) for (low, high), size in zip(pairwise(bounds), sizes, strict=True)
        )
        """C of [V_i, D_i]"""
        self.projections = nn.ParameterList(nn.Linear(size, dim).weight for size in sizes)
        """C of [dim, D_i]"""

    def rows(self, ids: Tensor) -> list[Tensor]:
        """ids [N] → for each cluster, the indices of its tokens. Their number depends on the data: a sync on a GPU."""
        return [((ids >= low) & (ids < high)).nonzero().squeeze(1) for low, high in pairwise(self.bounds)]


class AdaptiveEmbedding(nn.Module):
    """Vectors whose size depends on the frequency of the word, all projected to size dim."""

    def __init__(self, vocab: int, dim: int, cutoffs: Sequence[int], divisor: int) -> None:
        super().__init__()
        self.clusters = Clusters(vocab, dim, cutoffs, divisor)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] → [B, T, dim]"""
        held = self.clusters
        _check_ids(ids, held.vocab)
        flat = ids.flatten()
        rows = held.rows(flat)
        # A cluster without tokens runs on an empty batch, so that its parameters get a gradient of zeros.
        parts = [
            F.linear(F.embedding(flat.index_select(0, row) - low, weight), projection)
            for row, low, weight, projection in zip(rows, held.bounds[:-1], held.weights, held.projections, strict=True)
        ]
        x = torch.cat(parts).index_select(0, torch.cat(rows).argsort())
        return (x * math.sqrt(held.dim)).view(*ids.shape, held.dim)


class AdaptiveHead(nn.Module):
    """The output layer; `tied_to`: an embedding whose words and projections it shares; then only the biases
    and the rows of the tails are separate."""

    def __init__(
        self, vocab: int, dim: int, cutoffs: Sequence[int], divisor: int, tied_to: AdaptiveEmbedding | None = None,
        chunk: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.chunk = chunk
        if tied_to is None:
            self.clusters = Clusters(vocab, dim, cutoffs, divisor)
            for weight in self.clusters.weights:
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # like nn.Linear
        else:
            self.clusters = tied_to.clusters
            expected = (vocab, dim, tuple(cutoffs), divisor)
            if self.clusters.shape != expected:
                raise ValueError(
                    f"tied_to has (vocab, dim, cutoffs, divisor) {self.clusters.shape}; "
                    f"expected {expected} as the output layer"
                )
        self.biases = nn.ParameterList(torch.zeros(len(weight)) for weight in self.clusters.weights)
        """C of [V_i]"""
        self.tails = nn.Linear(dim, len(cutoffs))
        """The head's rows after the shortlist. Tail i has row −i, counted from the end, as in the code of
        the adaptive-span paper, so that its published word models load."""

    def logits(self, h: Tensor) -> Tensor:
        """h [B, T, dim] → [B, T, V], all log-probabilities: for generation, not for training."""
        head = _widened(self._scores(h, 0)).log_softmax(-1)
        parts = [head[..., : self.clusters.bounds[1]]]
        for i in range(1, len(self.biases)):
            parts.append(head[..., -i, None] + _widened(self._scores(h, i)).log_softmax(-1))
        return torch.cat(parts, -1)

    def nll(self, h: Tensor, targets: Tensor) -> Tensor:
        """h [B, T, dim], targets [B, T] → [B, T], −log p of each target, in float32 or wider.

        A tail is scored only for tokens whose target is in it. The host waits only for their number.
        """
        _check_ids(targets, self.clusters.vocab)
        return by_chunks(self._nll, self.chunk, h.flatten(0, -2), targets.flatten()).view(targets.shape)

    def _nll(self, h: Tensor, flat: Tensor) -> Tensor:
        shortlist, (_, *tails) = self.clusters.bounds[1], self.clusters.rows(flat)
        column = flat
        for i, row in enumerate(tails, 1):
            column = column.index_fill(0, row, shortlist + len(tails) - i)
        nll = _cross_entropy(self._scores(h, 0), column)
        for i, row in enumerate(tails, 1):
            word = flat.index_select(0, row) - self.clusters.bounds[i]
            nll = nll.index_add(0, row, _cross_entropy(self._scores(h.index_select(0, row), i), word))
        return nll

    def _scores(self, h: Tensor, i: int) -> Tensor:
        """h [..., dim] → [..., V_i]; for the head, i = 0, [..., V_0 + C − 1]."""
        weight, bias = self.clusters.weights[i], self.biases[i]
        if i == 0:
            weight, bias = torch.cat((weight, self.tails.weight)), torch.cat((bias, self.tails.bias))
        return F.linear(h @ self.clusters.projections[i], weight, bias)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [N, C], targets [N] → [N], in float32 or wider."""
    return F.cross_entropy(_widened(logits), targets, reduction="none")


def _widened(t: Tensor) -> Tensor:
    """In float32, or wider if it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _check_ids(ids: Tensor, vocab: int) -> None:
    """Check token ids, on the CPU only: elsewhere the host would have to wait."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    lowest, highest = (int(t) for t in ids.aminmax())
    if lowest < 0 or highest >= vocab:
        raise ValueError(
            f"token {lowest if lowest < 0 else highest} is outside the vocabulary; expected 0 … {vocab - 1}"
        )
