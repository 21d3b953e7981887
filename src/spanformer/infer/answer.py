"""Generation with an encoder–decoder: greedy decoding or beam search.

The source is encoded once: each layer keeps its keys and values, and those of the answer that its heads still see.
Shapes: B sources, S tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanformer.infer.beam import beam_search
from spanformer.infer.counts import check_counts
from spanformer.infer.prompt import Prompt, parts_of
from spanformer.infer.text import Vocabulary
from spanformer.memory.cache import Cache
from spanformer.model.seq2seq import Seq2Seq


def answer(
    model: Seq2Seq,
    sources: Sequence[Prompt],
    *,
    vocab: Vocabulary | None = None,
    max_tokens: int = 256,
    beams: int = 1,
) -> list[list[int]]:
    """The answer to each source as tokens, without the end token; cut after max_tokens.

    sources: texts (with vocab), or ids [S] without the end token, which is appended. beams: 1 decodes greedily, all
    sources in one batch; above 1, a beam search per source.
    """
    if not sources:
        raise ValueError("sources is empty; expected one or more")
    check_counts(max_tokens=max_tokens, beams=beams)
    size = model.begin if vocab is None else min(model.begin, vocab.size)
    ids = [np.concatenate([*parts_of(source, vocab, size), [model.end]]).astype(np.int64) for source in sources]
    cache = model.start(*_padded(ids, next(model.parameters()).device))
    logits = _first(model, cache)
    if beams == 1:
        return _greedy(model, cache, logits, max_tokens)
    return [_search(model, cache, logits, row, max_tokens, beams) for row in range(len(ids))]


def _padded(ids: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, S] ids, and [B, S] True where a source has ended."""
    lengths = np.array([len(each) for each in ids])
    source = np.zeros((len(ids), lengths.max()), np.int64)
    for row, each in enumerate(ids):
        source[row, : len(each)] = each
    padding = np.arange(lengths.max()) >= lengths[:, None]
    return torch.from_numpy(source).to(device), torch.from_numpy(padding).to(device)


def _first(model: Seq2Seq, cache: Cache) -> Tensor:
    """[B, V] logits of the first token."""
    begin = torch.full((cache.batch, 1), model.begin, device=next(model.parameters()).device)
    logits = model.decode(begin, cache, logits="last")
    assert logits is not None
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's predictions are not finite numbers; its weights are damaged")
    return logits


def _greedy(model: Seq2Seq, cache: Cache, logits: Tensor, max_tokens: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(len(logits))]
    rows = list(range(len(logits)))
    for made in range(1, max_tokens + 1):
        tokens = logits.argmax(-1).tolist()
        going = [n for n, token in enumerate(tokens) if token != model.end]
        for n in going:
            answers[rows[n]].append(tokens[n])
        if not going or made == max_tokens:
            break
        if len(going) < len(rows):  # drop rows that have ended
            cache.reorder(torch.tensor(going))
            rows = [rows[n] for n in going]
        newest = torch.tensor([[tokens[n]] for n in going], device=logits.device)
        found = model.decode(newest, cache, logits="last")
        assert found is not None
        logits = found
    return answers


def _search(model: Seq2Seq, cache: Cache, logits: Tensor, row: int, max_tokens: int, beams: int) -> list[int]:
    one = cache.fork(1)
    one.reorder(torch.tensor([row]))
    found = list(
        beam_search(model, one, logits[row : row + 1], beams, max_tokens, lambda last: last[-1] == model.end, 1)
    )
    return found[:-1] if found[-1] == model.end else found
