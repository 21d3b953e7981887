"""An inverted index (faiss) for datastores that are too large to scan: some 3·10⁶ entries and more.

Keys fall into lists by their nearest centre, and a query reads `nprobe` lists; candidates are rescored from the stored
keys like those of a scan, but no certificate is given: a list that is not read may hold a nearer key. faiss is optional
and imported when first used.

    index.faiss, index.json        beside the shards; the second has the count and the checksum of the first

Shapes: N entries, Q queries, m candidates.
"""

from __future__ import annotations

import importlib.util
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanformer.core.checks import whole_number
from spanformer.core.files import replace_file, write_text
from spanformer.core.progress import OnCount
from spanformer.retrieve.header import read_json
from spanformer.retrieve.store import Store

FILE, ABOUT = "index.faiss", "index.json"
LARGE = 3_000_000
"""entries from which on an index pays"""
SAMPLE = 64  # training keys a list: faiss wants 39 at least
PART = 8192


class Ivf:
    """candidates(queries, m) → ids of entries, −1 where too few were found."""

    def __init__(self, index: Any, nprobe: int) -> None:
        self.index, self.nprobe = index, nprobe

    def candidates(self, queries: Tensor, many: int) -> Tensor:
        """[Q, m] int64"""
        self.index.nprobe = self.nprobe  # a file has its own, 1 by default
        finite = queries.isfinite().all(-1)
        ids = torch.from_numpy(self.index.search(torch.where(finite[:, None], queries, 0.0).numpy(), many)[1])
        return torch.where(finite[:, None], ids, -1)


def load_faiss() -> Any:
    if importlib.util.find_spec("faiss") is None:
        raise ImportError('an index needs faiss: pip install "spanformer[knn]"; without one, all entries are scanned')
    import faiss  # pyright: ignore[reportMissingImports]

    return faiss


def build_index(store: Store, *, lists: int = 0, nprobe: int = 32, on_count: OnCount | None = None) -> Ivf:
    """Train an index on a sample of the keys, fill it and write it. lists: 0 for 4·√N."""
    lists = lists or 4 * math.isqrt(len(store))
    if not len(store) or len(store) < 39 * lists:
        raise ValueError(
            f"lists is {lists} for {len(store):,} entries; expected at most {len(store) // 39:,}: faiss needs 39 keys "
            "a list to train, and below some 3,000,000 entries a scan is exact and fast"
        )
    whole_number("nprobe", nprobe, 1, lists)
    faiss = load_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.index_factory(store.header.stored, f"IVF{lists},SQ8", faiss.METRIC_L2)
    step = max(1, len(store) // (SAMPLE * lists))
    index.train(np.concatenate([_vectors(part, slice(None, None, step)) for part in store.parts]))
    for part in store.parts:
        for at in range(0, part.about.count, PART):
            index.add(_vectors(part, slice(at, at + PART)))
        if on_count is not None:
            on_count(int(index.ntotal), len(store))
    with replace_file(store.folder / FILE) as new:
        faiss.write_index(index, str(new))
        checksum = zlib.crc32(new.read_bytes())
    about = {"entries": len(store), "crc32": checksum, "nprobe": nprobe}
    write_text(store.folder / ABOUT, json.dumps(about) + "\n")
    return Ivf(index, nprobe)


def read_index(store: Store) -> Ivf | None:
    """The index of a datastore, if it has one; refused if it is damaged or of another number of entries."""
    path: Path = store.folder / FILE
    if not (store.folder / ABOUT).exists():
        return None
    about = read_json(store.folder / ABOUT)
    if not path.is_file() or zlib.crc32(path.read_bytes()) != about.get("crc32"):
        raise ValueError(f"{path} does not fit its checksum: it is damaged; remove it and {ABOUT}, or index again")
    index = load_faiss().read_index(str(path))
    if index.ntotal != len(store) or index.d != store.header.stored:
        raise ValueError(
            f"{path} has {index.ntotal:,} keys of {index.d} numbers; expected {len(store):,} of {store.header.stored}, "
            "as the datastore: index it again (spanformer datastore index)"
        )
    return Ivf(index, whole_number("nprobe", about.get("nprobe"), 1))


def _vectors(part: Any, rows: slice) -> np.ndarray:
    keys = part.keys[rows].float()
    return (keys if part.scales is None else keys * part.scales[rows, None]).numpy()
