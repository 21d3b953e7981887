"""Building a datastore from a text: the model reads it window by window, and each context's key is stored with the
token that followed. Every token but the first becomes an entry; the last partial window counts, too.

A build that was stopped continues after its last shard, because shards are full windows of a text known by its digest.

Shapes: n tokens, D numbers of a key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spanformer.core.progress import OnCount
from spanformer.retrieve.header import NAME, Header, Keys
from spanformer.retrieve.model import KeyModel, check_made, header_of
from spanformer.retrieve.pca import Pca, fit_pca
from spanformer.retrieve.store import Store
from spanformer.retrieve.writer import SHARD_ENTRIES, check_room, check_same, open_writer

SAMPLE = 32768  # keys from which PCA finds its directions


@dataclass(frozen=True)
class Plan:
    keys: Keys = "int8"
    """how to store a key: int8 with a scale (a quarter of float32), float16, or float32"""
    pca: int = 0
    """store this many principal directions of a key; 0: all of it"""
    context: int = 0
    """tokens that the model reads at a time; 0: 1,024 for Hugging Face models, 8,192 for others"""
    limit: int = 0
    """use only the first tokens of the text; 0: all"""


@dataclass(frozen=True)
class Built:
    added: int
    before: int
    """entries of this text that were there"""


def text_digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def build_store(
    model: KeyModel, ids: np.ndarray, folder: Path, plan: Plan, *, on_count: OnCount | None = None,
    shard_entries: int = SHARD_ENTRIES,
) -> Built:  # fmt: skip
    """Append the entries of a text ids [n] to the datastore of `folder`, or make one."""
    ids = ids[: plan.limit + 1] if plan.limit else ids
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; expected 2 or more: a context and the token after it")
    header, digest, done = header_of(model, plan.keys, plan.pca, plan.context), text_digest(ids), 0
    there = (folder / NAME).exists()
    if there:
        store = Store(folder, verify=False)
        check_same(folder, store.header, header)
        check_made(store, model.maker, model.dim, model.vocab)
        done = store.done(digest)
    total = len(ids) - 1
    check_room(folder, header, total - done)
    pca = _directions(model, ids, header) if plan.pca and not there else None
    before = done
    with open_writer(folder, header, pca, entries=shard_entries) as writer:
        while done < total:
            window = torch.from_numpy(ids[done : min(done + header.context, total)].astype(np.int64))
            keys = torch.cat([piece.keys for piece in model.read(window, logits=False)])
            writer.add(keys, ids[done + 1 : done + 1 + len(window)], digest, done)
            done += len(window)
            if on_count is not None:
                on_count(done, total)
    return Built(done - before, before)


def _directions(model: KeyModel, ids: np.ndarray, header: Header) -> Pca:
    """From keys of windows spread over the text."""
    starts = np.arange(0, len(ids) - 1, header.context)
    chosen = starts[np.linspace(0, len(starts) - 1, min(len(starts), -(-SAMPLE // header.context))).astype(int)]
    sample: list[Tensor] = []
    for at in np.unique(chosen):
        window = torch.from_numpy(ids[at : min(at + header.context, len(ids) - 1)].astype(np.int64))
        sample += [piece.keys for piece in model.read(window, logits=False)]
    return fit_pca(torch.cat(sample), header.pca)
