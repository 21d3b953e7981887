"""The nearest entries of a datastore: a scan of all of them for candidates, then squared distances to the stored keys
in float64.

The scan reads float32 keys of up to 100,000 entries, and beyond that 8-bit codes of them, a quarter of the bytes. A
query has a certificate: with `bound` the error of a scanned score and s the worst candidate's, every entry that is no
candidate has ‖q − k‖² ≥ ‖q‖² − 2(s + bound). If the k-th distance is not above that, no nearer entry was missed.

Shapes: Q queries, D numbers of a key, N entries, k neighbours, m candidates.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spanformer.ops.search import Found, squared_distances, top_k
from spanformer.retrieve.store import Store

BATCH = 64  # queries that share a scan
FEW = 100_000
"""entries up to which stored keys are scanned, and not codes of them"""


class Neighbours(NamedTuple):
    distances: Tensor
    """[Q, k] float64, squared, smallest first; ∞ where there are fewer entries, or the query is not finite"""
    ids: Tensor
    """[Q, k] int64 numbers of entries; −1 likewise"""
    proved: Tensor
    """[Q] bool: proved to be the k nearest of all stored keys"""


class Index(Protocol):
    """What may propose candidates in the place of a scan (`spanformer.retrieve.ivf`)."""

    def candidates(self, queries: Tensor, many: int) -> Tensor: ...


def search(
    store: Store, queries: Tensor, k: int, *, candidates: int | None = None, index: Index | None = None,
    exact: bool | None = None,
) -> Neighbours:  # fmt: skip
    """The k nearest entries to each of queries [Q, D], as the model makes them; of equal distances, the first entry
    comes first. k may exceed the number of entries. index: proposes candidates instead of a scan of all entries. exact:
    scan the stored keys themselves; None: if there are at most 100,000, or they are int8."""
    if queries.ndim != 2 or queries.shape[1] != store.header.dim:
        raise ValueError(
            f"queries has shape {list(queries.shape)}; expected [Q, {store.header.dim}], as the datastore's keys"
        )
    if k < 1:
        raise ValueError(f"k is {k}; expected 1 or more")
    queries = queries.detach().float()
    queries = queries if store.pca is None else store.pca.project(queries)
    exact = store.header.keys == "int8" or (len(store) <= FEW if exact is None else exact)
    # scores of stored keys are off by float32's rounding, or that of 16-bit queries, only
    many = max(k, (k + 16 if exact else 2 * k + 64) if candidates is None else candidates)
    if not len(store) or not len(queries):
        none = torch.full((len(queries), k), torch.inf, dtype=torch.float64)
        return Neighbours(none, torch.full_like(none, -1, dtype=torch.int64), none[:, 0] > 0)
    found = [_search(store, queries[n : n + BATCH], k, many, index, exact) for n in range(0, len(queries), BATCH)]
    return Neighbours(*(torch.cat(each) for each in zip(*found, strict=True)))


def _search(
    store: Store, queries: Tensor, k: int, many: int, index: Index | None, exact: bool
) -> Neighbours:  # fmt: skip
    if index is not None:
        distances, ids = rescore(store, queries, index.candidates(queries, many), k)
        return Neighbours(distances, ids, torch.zeros(len(queries)) > 0)
    scanned = [(part.first, part.rows if exact else part.codes) for part in store.parts]
    parts = [(first, top_k(codes, queries[None], min(many, codes.count))) for first, codes in scanned]
    scores, ids, bound = _merge(parts, many)
    distances, ids = rescore(store, queries, ids, k)
    missed = queries.double().square().sum(-1) - 2 * (scores[:, -1].double() + bound.double())
    proved = (distances.nan_to_num(posinf=-1.0).amax(1) <= missed) | (many >= len(store))
    return Neighbours(distances, ids, proved & queries.isfinite().all(-1))


def rescore(store: Store, queries: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of candidates ids [Q, m], by their stored keys: squared distances and ids [Q, k]."""
    distances = torch.full(ids.shape, torch.inf, dtype=torch.float64)
    for part in store.parts:
        inside = (ids >= part.first) & (ids < part.first + part.about.count)
        local = torch.where(inside, ids - part.first, -1)
        distances = torch.minimum(distances, squared_distances(part.keys, part.scales, queries, local))
    order = torch.from_numpy(np.lexsort((ids.numpy(), distances.numpy())))
    distances, ids = distances.gather(1, order), ids.gather(1, order)
    if ids.shape[1] < k:
        distances = torch.nn.functional.pad(distances, (0, k - ids.shape[1]), value=torch.inf)
        ids = torch.nn.functional.pad(ids, (0, k - ids.shape[1]), value=-1)
    return distances[:, :k], ids[:, :k]


def _merge(parts: list[tuple[int, Found]], many: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidates of all shards: scores and ids [Q, m], and the largest bound [Q]."""
    scores = torch.cat([found.scores[0] for _, found in parts], 1)
    ids = torch.cat([torch.where(found.ids[0] < 0, -1, found.ids[0] + first) for first, found in parts], 1)
    bound = torch.stack([found.bound[0] for _, found in parts]).amax(0)
    best, order = scores.sort(dim=1, descending=True, stable=True)  # shards are in order: equal scores stay so
    best, ids = best[:, :many], ids.gather(1, order[:, :many])
    return best, torch.where(best == -torch.inf, -1, ids), bound
