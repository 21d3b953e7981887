"""Pairs of texts: lines "source ⇥ target" as tokens, in padded batches.

Every line ends with a newline; a last line without one is skipped, since a limit may have cut it.
Shapes: B pairs of a batch, S and T tokens of its longest source and target, plus one begin or end token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.lanes import saved_place
from spanformer.data.vocab import Vocab

POOL = 16  # batches per pool; within a pool, pairs of similar length share a batch


@dataclass(frozen=True)
class PairBatch:
    source: np.ndarray
    """[B, S] int64, each row ending with `end`"""
    source_padding: np.ndarray
    """[B, S] bool: True after a source's end"""
    x: np.ndarray
    """[B, T] int64: `begin`, then the target"""
    y: np.ndarray
    """[B, T] int64: the target, then `end`"""
    padding: np.ndarray
    """[B, T] bool: True where x and y are padding"""
    tokens: int
    """of all targets with their end tokens; in a shared batch, over all processes"""


class Pairs:
    """The pairs of a split. begin, end: ids outside the text's vocabulary."""

    def __init__(self, ids: np.ndarray, vocab: Vocab, *, begin: int, end: int, longest: int, name: str) -> None:
        """longest: most tokens of a source or target, end token included; name: of the split, for errors."""
        tab, newline = (_one(vocab, text) for text in ("\t", "\n"))
        self.begin, self.end, self.ids = begin, end, ids
        ends = np.flatnonzero(ids == newline)
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
        tabs = np.flatnonzero(ids == tab)
        between = np.searchsorted(tabs, ends) - np.searchsorted(tabs, starts)
        wrong = np.flatnonzero(between != 1)
        if not len(ends):
            raise ValueError(f"{name} has no line; expected lines of two texts with a tab between them")
        if len(wrong):
            raise ValueError(
                f"line {wrong[0] + 1} of {name} has {between[wrong[0]]} tabs; expected two texts with a tab between "
                "them"
            )
        middle = tabs[np.searchsorted(tabs, starts)]
        self.bounds = np.stack([starts, middle, ends], 1)
        """[pairs, 3]: positions of the source's start, the tab and the target's newline"""
        self.lengths = np.stack([middle - starts, ends - middle - 1], 1) + 1
        """[pairs, 2]: tokens of source and target, end tokens included"""
        if (most := int(self.lengths.max())) > longest:
            line = int(self.lengths.max(1).argmax()) + 1
            raise ValueError(
                f"line {line} of {name} has a text of {most} tokens with its end; train.block is {longest}: raise it "
                "or shorten the line"
            )

    def __len__(self) -> int:
        return len(self.bounds)

    @property
    def tokens(self) -> int:
        """Tokens of all targets, end tokens included."""
        return int(self.lengths[:, 1].sum())

    def texts(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and target of a pair, without end tokens."""
        start, middle, stop = self.bounds[row].tolist()
        return self.ids[start:middle], self.ids[middle + 1 : stop]

    def batch(self, every: np.ndarray, some: slice | None = None) -> PairBatch:
        """every: indices of the pairs; some: the rows of them to return (this process's)."""
        rows = every[some or slice(None)]
        s, t = self.lengths[rows].max(0).tolist()
        source = np.full((len(rows), s), self.end, np.int64)
        x, y = np.full((2, len(rows), t), self.end, np.int64)
        x[:, 0] = self.begin
        for at, row in enumerate(rows.tolist()):
            first, second = self.texts(row)
            source[at, : len(first)] = first
            x[at, 1 : len(second) + 1] = y[at, : len(second)] = second
        lengths = self.lengths[rows]
        behind = [np.arange(width) >= lengths[:, side, None] for side, width in enumerate((s, t))]
        return PairBatch(source, behind[0], x, y, behind[1], int(self.lengths[every, 1].sum()))


class PairStream:
    """Endless batches of `lanes` pairs for training, shuffled by (seed, epoch); pairs of similar length share a batch.
    `rows`: this process's rows of a batch that several processes share."""

    def __init__(self, pairs: Pairs, lanes: int, *, seed: int = 0, rows: slice | None = None) -> None:
        if len(pairs) < lanes:
            raise ValueError(f"there are {len(pairs)} pairs to train on; expected at least a batch of {lanes}")
        self.pairs, self.lanes, self.seed, self.rows = pairs, lanes, seed, rows or slice(None)
        self.epoch = self.position = 0
        self._order = (-1, np.empty((0, lanes), np.int64))

    def __iter__(self) -> PairStream:
        return self

    def __next__(self) -> PairBatch:
        if self.position == len(self.pairs) // self.lanes:
            self.epoch, self.position = self.epoch + 1, 0
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self._batches())
        chosen = self._order[1][self.position]
        self.position += 1
        return self.pairs.batch(chosen, self.rows)

    def state(self) -> dict[str, int]:
        """Position and shape of the stream, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, **self._shape()}

    def load(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken."""
        self.epoch, self.position = saved_place(state, self._shape(), len(self.pairs) // self.lanes)

    def _shape(self) -> dict[str, int]:
        return {"pairs": len(self.pairs), "lanes": self.lanes, "seed": self.seed}

    def _batches(self) -> np.ndarray:
        """[batches, lanes] pairs of this epoch; an incomplete last batch is dropped."""
        draw = np.random.default_rng([self.seed, self.epoch])
        order = draw.permutation(len(self.pairs))[: len(self.pairs) // self.lanes * self.lanes]
        pools = np.array_split(order, range(POOL * self.lanes, len(order), POOL * self.lanes))
        alike = [pool[np.argsort(self.pairs.lengths[pool, 1], kind="stable")] for pool in pools]
        return draw.permutation(np.concatenate(alike).reshape(-1, self.lanes))


def _one(vocab: Vocab, text: str) -> int:
    """The id of one character."""
    if vocab.kind not in ("byte", "char"):
        raise ValueError(f"tokens is {vocab.kind!r}; expected 'char' or 'byte' for pairs of texts")
    token = int(vocab.encode(text)[0])
    if token == vocab.unknown:
        raise ValueError("the text has no tab; expected lines of two texts with a tab between them")
    return token
