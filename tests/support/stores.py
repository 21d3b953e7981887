"""Small datastores of random keys, and kNN-LM written out in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from spanformer.retrieve import Header, Store
from spanformer.retrieve.header import Maker
from spanformer.retrieve.pca import fit_pca
from spanformer.retrieve.writer import open_writer

MAKER = Maker("d" * 64, "a key", "float32", "t" * 64, "toy")
VOCAB, DIM = 50, 24


def random_keys(count: int, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def random_tokens(count: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def make_store(folder: Path, count: int, *, keys="float32", pca: int = 0, shard: int = 40, seed: int = 0) -> Store:
    """In shards of about `shard` entries."""
    vectors, tokens = random_keys(count, seed=seed), random_tokens(count, seed=seed)
    header = Header(DIM, VOCAB, MAKER, keys, pca, 16)
    with open_writer(folder, header, fit_pca(vectors, pca) if pca else None, entries=shard) as writer:
        for at in range(0, count, 16):
            writer.add(vectors[at : at + 16], tokens[at : at + 16], "text", at)
    return Store(folder)


def knn_by_hand(keys, tokens, query, k: int, temperature: float, vocab: int = VOCAB) -> torch.Tensor:
    """[V] float64 p_kNN of one query, from all entries: the definition."""
    d = (keys.double() - query.double()).square().sum(-1)
    nearest = sorted(range(len(d)), key=lambda n: (float(d[n]), n))[:k]
    weight = torch.softmax(-d[nearest] / temperature, 0)
    p = torch.zeros(vocab, dtype=torch.float64)
    for n, w in zip(nearest, weight, strict=True):
        p[int(tokens[n])] += w
    return p
