"""A language model must give the logits of one pass however it reads a text: by segments, or from a KV cache.

Shapes: B rows, T tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spanformer import LM
from spanformer.memory import Cache

VOCAB = 31
"""tokens of the models under test, or more"""


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_segments(lm: LM, x: Tensor, cuts: Sequence[int], documents: Tensor | None = None) -> Tensor:
    """[B, T, V] logits of x [B, T], cut into segments at `cuts`."""
    parts, state, cuts = [], None, list(cuts)
    ids = [None] * (len(cuts) + 1) if documents is None else documents.tensor_split(cuts, 1)
    for piece, some in zip(x.tensor_split(cuts, 1), ids, strict=True):
        found = lm(piece, state, documents=some)
        parts.append(found.logits)
        state = found.state
    return torch.cat(parts, 1)


def from_cache(lm: LM, x: Tensor, sizes: Sequence[int], slack: int = 0) -> Tensor:
    """[B, T, V] logits of x [B, T], decoded in pieces of these sizes."""
    cache = lm.cache(len(x), slack=slack)
    parts = [decoded(lm, piece, cache) for piece in x.split(list(sizes), 1)]
    assert cache.seen.tolist() == [x.shape[1]] * len(x)
    return torch.cat(parts, 1)


def decoded(lm: LM, x: Tensor, cache: Cache) -> Tensor:
    logits = lm.decode(x, cache)
    assert logits is not None
    return logits


def check_continued(lm: LM, cache: Cache, kept: Sequence[Tensor], more: Tensor) -> None:
    """Decode `more` [B, T] with a cache that holds `kept`, [n] ids of each row, and compare with one pass."""
    after = decoded(lm, more, cache)
    for row, (before, ids) in enumerate(zip(kept, more, strict=True)):
        whole = lm(torch.cat([before, ids])[None]).logits
        torch.testing.assert_close(after[row], whole[0, len(before) :])


def check_rows_of_different_lengths(
    lm: LM, lengths: Sequence[int], more: int, *, slack: int = 0, back: Sequence[int] = ()
) -> None:
    """Rows of these lengths are read at once, padded at their ends; then `more` tokens. back: crop rows by this."""
    longest, kept = max(lengths), list(lengths)
    x, cache = text(len(lengths), longest + more), lm.cache(len(lengths), slack=slack)
    lm.decode(x[:, :longest], cache, lengths=torch.tensor(lengths))
    if back:
        kept = [n - b for n, b in zip(lengths, back, strict=True)]
        cache.crop(torch.tensor(kept))
    check_continued(lm, cache, [ids[:n] for ids, n in zip(x, kept, strict=True)], x[:, longest:])


def check_crop_reorder_fork_and_save(lm: LM, folder: Path, sizes: Sequence[int], more: int) -> None:
    """Three rows are read in pieces of these sizes and cropped by 0, 3 and 4 tokens; the last two are saved, loaded and
    forked, and both caches continue."""
    read = sum(sizes)
    x, cache = text(3, read + more), lm.cache(3, slack=4)
    for piece in x[:, :read].split(list(sizes), 1):
        lm.decode(piece, cache)
    kept = [x[row, : read - back] for row, back in enumerate((0, 3, 4))]
    cache.crop(torch.tensor([len(ids) for ids in kept]))
    cache.reorder(torch.tensor([2, 1]))
    cache.save(folder / "cache")
    fork = Cache.load(folder / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        check_continued(lm, one, [kept[row] for row in rows], x[rows, read:])


def check_rows_and_stack_of_states(lm: LM, length: int, more: int) -> None:
    """Halves of a batch continue from halves of its state as the whole does, and their states stack to the whole's."""
    x, then = text(4, length), text(4, more, seed=1)
    state = lm(x).state
    whole = lm(then, state)
    halves = [lm(then[some], state.rows(some)) for some in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(torch.cat([half.logits for half in halves]), whole.logits)
    joined = type(state).stack([half.state for half in halves]).tensors()
    for name, t in whole.state.tensors().items():
        torch.testing.assert_close(joined[name], t)
