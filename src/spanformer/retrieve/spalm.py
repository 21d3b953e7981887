"""SPALM's neighbours (`spanformer.model.neighbours` has the gate and the equations): found by the keys of a frozen
model, so once for a text, before training; and while a text is read or generated.

    keys, store = LmKeys(frozen), Store("folder")
    near = neighbour_tokens(keys, store, ids, k)             # the training text, without what gives the answer away
    with finding(lm, Search(keys, store, k)):
        generate(lm, prompt)                                 # also lm(x, state), score, evaluate

A token of the training text must not find itself, its surroundings or a copy of its passage: it would learn to copy
the answer.

Shapes: B batch, T tokens, k neighbours, n tokens of a text, m candidates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from spanformer.core.progress import OnCount
from spanformer.memory import Cache, State
from spanformer.model.lm import LM
from spanformer.model.neighbours import NONE
from spanformer.retrieve.build import text_digest
from spanformer.retrieve.fit import run_hashes, windows
from spanformer.retrieve.model import KeyModel, LmKeys, check_made, taken, watched
from spanformer.retrieve.search import search
from spanformer.retrieve.store import Store

WINDOW = 32
"""entries on either side of a token's own that it must not find"""
COPY = 8
"""tokens before a neighbour, its own included, that make it a copy if all are those of the text"""


def neighbour_tokens(
    model: KeyModel, store: Store, ids: np.ndarray, k: int, *, window: int = WINDOW, copy: int = COPY,
    on_count: OnCount | None = None,
) -> np.ndarray:  # fmt: skip
    """[n − 1, k] int32: for each context of a text ids [n], the tokens that followed its k nearest contexts of the
    datastore; −1 where there are fewer. Of a text that is in the datastore, a token's own entry, `window` entries
    around it and copies of its last `copy` tokens are left out."""
    check_made(store, model.maker, model.dim, model.vocab)
    if k < 1 or window < 0 or copy < 0:
        raise ValueError(f"k is {k}, window {window}, copy {copy}; expected 1 or more, and 0 or more of the others")
    own, found, done = own_entries(store, ids), np.full((len(ids) - 1, k), NONE, np.int32), 0
    hashes = None
    if copy and min(len(ids), len(store) + 1) > copy and bool((own >= 0).any()):
        hashes = run_hashes(store.tokens, copy), run_hashes(ids[1:], copy)
    for inputs, _ in windows(ids, store.header.context):
        keys = torch.cat([piece.keys for piece in model.read(inputs, logits=False)])
        near, at = search(store, keys, 2 * k + 2 * window + 1).ids.numpy(), np.arange(done, done + len(inputs))
        mine = own[at, None]
        bad = (near < 0) | ((mine >= 0) & (np.abs(near - mine) <= window))
        if hashes is not None:
            bad |= _copies(*hashes, near, at, copy) & (mine >= 0)
        found[at] = _first(store, near, bad, k)
        done += len(inputs)
        if on_count is not None:
            on_count(done, len(ids) - 1)
    return found


def own_entries(store: Store, ids: np.ndarray) -> np.ndarray:
    """[n − 1] int64: the entry that was made of each context of a text, −1 where there is none."""
    own, digest = np.full(len(ids) - 1, NONE, np.int64), text_digest(ids)
    for part in store.parts:
        if part.about.text == digest:
            end = min(part.about.start + part.about.count, len(own))
            own[part.about.start : end] = part.first + np.arange(end - part.about.start)
    return own


def _copies(theirs: np.ndarray, ours: np.ndarray, near: np.ndarray, at: np.ndarray, copy: int) -> np.ndarray:
    """[n, m] bool: the last `copy` tokens of neighbour near [n, m], the one that followed included, are those of the
    text up to the token after context `at` [n]. theirs, ours: hashes of the runs of both."""
    start, mine = near - copy + 1, at - copy + 1
    same = theirs[np.clip(start, 0, len(theirs) - 1)] == ours[np.clip(mine, 0, len(ours) - 1)][:, None]
    return same & (start >= 0) & (mine >= 0)[:, None]


def _first(store: Store, near: np.ndarray, bad: np.ndarray, k: int) -> np.ndarray:
    """[n, k] tokens of the first neighbours that are not bad."""
    order = np.argsort(bad, 1, kind="stable")[:, :k]  # the nearest that are left come first
    chosen = np.where(np.take_along_axis(bad, order, 1), NONE, np.take_along_axis(near, order, 1))
    return np.where(chosen < 0, NONE, store.tokens[np.maximum(chosen, 0)] if len(store) else NONE)


class Search:
    """Finds neighbours while a model reads: a frozen model reads the same text, and its keys are searched for."""

    def __init__(self, keys: LmKeys, store: Store, k: int) -> None:
        check_made(store, keys.maker, keys.dim, keys.vocab)
        self.keys, self.store, self.k = keys, store, k

    def read(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        with torch.inference_mode(), watched(self.keys.feedforward) as seen:
            after = self.keys.lm(x, state, targets=x).state
            return self._tokens(taken(seen), x), after

    def cache(self, batch: int, slack: int) -> Cache:
        return self.keys.lm.cache(batch, slack=slack)

    def decode(self, x: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        with watched(self.keys.feedforward) as seen:
            self.keys.lm.decode(x, cache, lengths=lengths, logits="none")
            return self._tokens(taken(seen), x)

    def receptive_field(self) -> int:
        return self.keys.lm.receptive_field()

    def _tokens(self, keys: Tensor, x: Tensor) -> Tensor:
        ids = search(self.store, keys.reshape(-1, keys.shape[-1]).float(), self.k).ids.numpy()
        return torch.from_numpy(_first(self.store, ids, ids < 0, self.k)).view(*x.shape, self.k)


@contextlib.contextmanager
def finding(lm: LM, finder: Search) -> Iterator[LM]:
    """Inside this block the model finds neighbours itself: in `lm(x)`, in scoring and in generation."""
    if not lm.config.neighbours:
        raise ValueError("model.neighbours is 0; expected a model that was trained with neighbours (runs/spalm.toml)")
    if finder.keys.vocab > lm.config.vocab:
        raise ValueError(
            f"the frozen model has a vocabulary of {finder.keys.vocab:,} tokens; expected at most "
            f"{lm.config.vocab:,}, as the model has"
        )
    lm.finder = finder
    try:
        yield lm
    finally:
        lm.finder = None
