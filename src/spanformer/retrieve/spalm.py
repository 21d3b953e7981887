"""SPALM: a language model that learns when to follow the tokens of retrieved contexts.

Adaptive Semiparametric Language Models, https://arxiv.org/abs/2102.02557

    m_t = Σ_i softmax_i(y_i·h_t) y_i        y_i: embedding of the token that followed neighbour i, trained and tied
    g_t = σ(w_g·h_t + b_g)                  one number a token; g → 1 means no memory
    z_t = (1 − g_t) m_t + g_t h_t           p = softmax(W z_t)

Neighbours are found by the keys of a frozen model, so once, before training. A token of the training text must not find
itself, its surroundings or a copy of its passage: it would learn to copy the answer. b_g starts where g is 0.9.

Shapes: B batch, T tokens, k neighbours, n tokens of a text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spanformer.core.progress import OnCount
from spanformer.memory import State
from spanformer.model.embedding import Embedding
from spanformer.model.lm import LM, LMOutput
from spanformer.retrieve.build import text_digest
from spanformer.retrieve.fit import run_hashes, windows
from spanformer.retrieve.model import KeyModel, check_made
from spanformer.retrieve.search import search
from spanformer.retrieve.store import Store

NONE = -1
START = 0.9  # the gate's first value
WINDOW = 32
"""entries on either side of a token's own that it must not find"""
COPY = 8
"""tokens before a neighbour, its own included, that make it a copy if all are those of the text"""


def neighbour_tokens(
    model: KeyModel, store: Store, ids: np.ndarray, k: int, *, window: int = WINDOW, copy: int = COPY,
    on_count: OnCount | None = None,
) -> np.ndarray:  # fmt: skip
    """[n − 1, k] int64: for each context of a text ids [n], the tokens that followed its k nearest contexts of the
    datastore; −1 where there are fewer. Of a text that is in the datastore, a token's own entry, `window` entries
    around it and copies of its last `copy` tokens are left out."""
    check_made(store, model.maker, model.dim, model.vocab)
    if k < 1 or window < 0 or copy < 0:
        raise ValueError(f"k is {k}, window {window}, copy {copy}; expected 1 or more, and 0 or more of the others")
    own, found, done = own_entries(store, ids), [], 0
    for inputs, _ in windows(ids, store.header.context):
        keys = torch.cat([piece.keys for piece in model.read(inputs, logits=False)])
        found.append(search(store, keys, 2 * k + 2 * window + 1).ids.numpy())
        done += len(inputs)
        if on_count is not None:
            on_count(done, len(ids) - 1)
    near = np.concatenate(found)
    inside = own >= 0
    bad = (near < 0) | (inside[:, None] & (np.abs(near - own[:, None]) <= window))
    if copy and min(len(ids), len(store) + 1) > copy and inside.any():
        bad |= _copies(store, ids, near, copy) & inside[:, None]
    order = np.argsort(bad, 1, kind="stable")[:, :k]  # the nearest that are left come first
    chosen = np.where(np.take_along_axis(bad, order, 1), NONE, np.take_along_axis(near, order, 1))
    return np.where(chosen < 0, NONE, store.tokens[np.maximum(chosen, 0)] if len(store) else NONE)


def own_entries(store: Store, ids: np.ndarray) -> np.ndarray:
    """[n − 1] int64: the entry that was made of each context of a text, −1 where there is none."""
    own, digest = np.full(len(ids) - 1, NONE, np.int64), text_digest(ids)
    for part in store.parts:
        if part.about.text == digest:
            end = min(part.about.start + part.about.count, len(own))
            own[part.about.start : end] = part.first + np.arange(end - part.about.start)
    return own


def _copies(store: Store, ids: np.ndarray, near: np.ndarray, copy: int) -> np.ndarray:
    """[n − 1, m] bool: the last `copy` tokens of the neighbour, the one that followed included, are the text's."""
    theirs, ours = run_hashes(store.tokens, copy), run_hashes(ids[1:], copy)
    at = near - copy + 1
    same = theirs[np.clip(at, 0, len(theirs) - 1)] == np.concatenate([np.zeros(copy - 1, ours.dtype), ours])[:, None]
    return same & (at >= 0) & (np.arange(len(near)) >= copy - 1)[:, None]


class Spalm(nn.Module):
    """A language model with a gate; train it like the model itself, with the neighbours of each token."""

    def __init__(self, lm: LM) -> None:
        super().__init__()
        if not lm.config.embedding.tied or not isinstance(lm.embedding, Embedding):
            raise ValueError(
                "the model's output layer is not tied to one embedding of all tokens; SPALM adds embeddings of tokens "
                "to the states that it reads: set embedding.tied, without cutoffs"
            )
        self.lm, self.gate = lm, nn.Linear(lm.config.dim, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, math.log(START / (1 - START)))

    def forward(
        self, x: Tensor, neighbours: Tensor, state: State | None = None, *, targets: Tensor | None = None
    ) -> LMOutput:
        """x [B, T] ids; neighbours [B, T, k]: tokens that followed the contexts nearest to each, −1 for none."""
        if neighbours.shape[:2] != x.shape or neighbours.ndim != 3:
            raise ValueError(f"neighbours has shape {list(neighbours.shape)}; expected [{x.shape[0]}, {x.shape[1]}, k]")

        def mix(_norm: nn.Module, _inputs: object, h: Any) -> Tensor:
            return self.mix(h, neighbours)

        handle = self.lm.norm.register_forward_hook(mix)
        try:
            return self.lm(x, state, targets=targets)
        finally:
            handle.remove()

    def mix(self, h: Tensor, neighbours: Tensor) -> Tensor:
        """h [B, T, dim] → z; h itself where there is no neighbour."""
        there = neighbours >= 0
        y = self.lm.embedding(neighbours.clamp_min(0).flatten(1)).view(*neighbours.shape, -1)
        scores = (y @ h[..., None])[..., 0].masked_fill(~there, -torch.inf)
        some = there.any(-1, keepdim=True)
        weight = scores.masked_fill(~some, 0.0).softmax(-1) * there
        m = (weight[..., None] * y).sum(-2)
        g = torch.sigmoid(self.gate(h))
        return torch.where(some, (1 - g) * m + g * h, h)
