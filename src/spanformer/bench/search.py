"""`spanformer bench search`: time exact search over keys, by 8-bit codes and in float32, against torch and faiss.

Shapes: N keys of D numbers, Q queries at a time, k to find.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.ops.search import Codes, squared_distances, top_k

CASES = {"heads": (65536, 64), "store": (1_000_000, 576)}
QUICK = {"heads": (512, 64), "store": (700, 576)}
QUERIES = (1, 64)
PART = 16384
OURS, EXACT, TORCH = "int8 codes, rescored", "float32", "torch matmul, topk"
BLAS = 20  # faiss uses BLAS from this many queries on if it is told; its own limit has been tuned for many threads


@dataclass(frozen=True)
class SearchBench(BenchOptions):
    """Time the search of the nearest of many keys, one query alone and 64 together.

        spanformer bench search --parts heads
        spanformer bench search --out docs/results/search.json      (needs 6 GB of memory)

    Every contender's result is compared with float64 distances of all keys before it is timed. faiss runs with its best
    settings; install it with  pip install "spanformer[knn]".
    """

    parts: tuple[str, ...] = ()
    """heads: 65,536 keys of 64 numbers; store: 1,000,000 of 576. Default: both."""
    k: int = 64
    """Keys to find."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, CASES)
        if self.k < 1:
            raise ValueError(f"k is {self.k}; expected at least 1")


def run(bench: Bench[SearchBench]) -> None:
    chosen = bench.options.parts or tuple(CASES)
    bench.plan(len(chosen) * len(QUERIES))
    for part in chosen:
        bench.keep(part, measure(bench, *(QUICK if bench.options.quick else CASES)[part]))


def make_keys(count: int, dim: int) -> Tensor:
    """[N, D] float32 in clusters, as keys of a model are: in directions without structure all keys are as far."""
    g = torch.Generator().manual_seed(0)
    centres, keys = torch.randn(256, dim, generator=g), torch.empty(count, dim)
    for at in range(0, count, PART):
        n = min(PART, count - at)
        keys[at : at + n] = centres[torch.randint(0, 256, (n,), generator=g)] + torch.randn(n, dim, generator=g)
    return keys


def measure(bench: Bench[SearchBench], count: int, dim: int) -> dict:
    bench.begin(f"making {count:,} keys of {dim}")
    keys, k = make_keys(count, dim), min(bench.options.k, count)
    contenders = {**ours(keys, k), **faiss_contenders(bench, keys, k)}
    found: dict = {"keys": count, "dim": dim, "k": k, "queries": {}}
    for many in QUERIES:
        queries = keys[torch.arange(many) * (count // many)] + 0.5 * torch.randn(
            many, dim, generator=torch.Generator().manual_seed(1)
        )
        recalls = {name: check(name, keys, queries, search(queries), k) for name, search in contenders.items()}
        runs = {name: functools.partial(search, queries) for name, search in contenders.items()}
        times = bench.compare(f"{many} queries, {count:,} keys of {dim}", runs, shortest=0.05)
        bench.say(f"{count:,} keys of {dim}, k {k}, {many} queries at a time, {bench.options.threads} threads")
        rows = {}
        for name, timing in times.items():
            ratio = times[OURS].times_as_fast_as(timing)
            rows[name] = {"ms_a_query": 1e3 * timing.median / many, "recall": recalls[name], "int8_is_faster": ratio}
            shown = f"{rows[name]['ms_a_query']:9.3f} ms a query, recall {recalls[name]:.4f}"
            bench.say(f"  {name:24} {shown}   {ratio:6.2f}×")
        found["queries"][str(many)] = rows
    return found


def ours(keys: Tensor, k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    codes, rows = Codes(1, keys.shape[1], metric="l2", capacity=len(keys)), Codes.of(keys[None], None, "l2")
    for at in range(0, len(keys), PART):
        codes.append(keys[None, at : at + PART])
    halves = keys.square().sum(-1) / 2

    def rescored(queries: Tensor) -> Tensor:
        ids = top_k(codes, queries[None], 2 * k).ids[0]
        order = squared_distances(keys, None, queries, ids).topk(min(k, len(keys)), largest=False).indices
        return ids.gather(1, order)

    def by_torch(queries: Tensor) -> Tensor:
        return (queries @ keys.T - halves).topk(k).indices

    return {OURS: rescored, EXACT: lambda queries: top_k(rows, queries[None], k).ids[0], TORCH: by_torch}


def faiss_contenders(bench: Bench[SearchBench], keys: Tensor, k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    if importlib.util.find_spec("faiss") is None:
        bench.say('without faiss: pip install "spanformer[knn]" to compare with it')
        return {}
    import faiss  # pyright: ignore[reportMissingImports]

    faiss.omp_set_num_threads(bench.options.threads)
    flat, coded = faiss.IndexFlatL2(keys.shape[1]), faiss.IndexScalarQuantizer(
        keys.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2
    )  # fmt: skip
    flat.add(keys.numpy())
    coded.train(keys[:PART].numpy())
    coded.add(keys.numpy())
    own = faiss.cvar.distance_compute_blas_threshold

    def search(index, threshold: int, queries: Tensor) -> Tensor:
        faiss.cvar.distance_compute_blas_threshold = threshold
        return torch.from_numpy(index.search(queries.numpy(), k)[1])

    return {
        f"faiss {faiss.__version__} Flat": functools.partial(search, flat, own),
        "faiss Flat, BLAS": functools.partial(search, flat, BLAS),
        "faiss SQ8": functools.partial(search, coded, own),
    }


def check(name: str, keys: Tensor, queries: Tensor, ids: Tensor, k: int) -> float:
    """The share of the true nearest keys that is found, for up to 8 queries; too low a share is refused."""
    some = queries[:8].double()
    best = torch.full((len(some), k), torch.inf, dtype=torch.float64)
    truth = torch.full((len(some), k), -1)
    for at in range(0, len(keys), PART):
        d = torch.cdist(some, keys[at : at + PART].double())
        best, order = torch.cat([best, d], 1).topk(k, largest=False)
        truth = torch.cat([truth, torch.arange(at, at + d.shape[1]).expand(len(some), -1)], 1).gather(1, order)
    share = float((ids[: len(some), :, None] == truth[:, None]).any(1).double().mean())
    if share < 0.9:
        raise ValueError(f"{name} finds {share:.3f} of the {k} nearest keys; expected 0.9 or more")
    return share


OPTIONS = SearchBench
