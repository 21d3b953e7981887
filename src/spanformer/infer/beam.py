"""Beam search.

Each step extends the `beams` likeliest prefixes by every token. A prefix ends with a stop string or the model's end
token. The search ends when `beams` have ended and no other is likelier per token than the worst of these, or at the
maximum length; the winner has the highest log-probability per token.
Shapes: B beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.memory.cache import Cache
from spanformer.model.decoder import Decoder


@dataclass(frozen=True)
class Beam:
    score: float = 0.0
    """sum of the log-probabilities of its tokens"""
    length: int = 0
    tail: tuple[int, ...] = ()
    """its tokens from the first one on which the beams differ"""
    last: tuple[int, ...] = ()
    """its last tokens, enough to decide whether it has ended"""

    def mean(self) -> float:
        return self.score / self.length


def beam_search(
    model: Decoder,
    cache: Cache,
    logits: Tensor,
    beams: int,
    max_tokens: int,
    has_ended: Callable[[tuple[int, ...]], bool],
    looks_at: int,
) -> Iterator[int]:
    """Tokens of the winner, each as soon as all remaining candidates agree on it.

    logits [1, V]: for the token after the text in the KV cache, which has one row now and one per beam afterwards.
    has_ended receives every beam's last `looks_at` tokens.
    """
    live, ended = [Beam()], []
    for made in range(1, max_tokens + 1):
        live, parents, done = _grow(live, logits, beams, has_ended, looks_at)
        ended = sorted([*ended, *done], key=Beam.mean, reverse=True)[:beams]
        while len({beam.tail[:1] for beam in [*live, *ended]}) == 1 and (live or ended)[0].tail:
            yield (live or ended)[0].tail[0]
            live, ended = ([_settled(beam) for beam in group] for group in (live, ended))
        if made == max_tokens or not live:
            break
        if len(ended) == beams and max(map(Beam.mean, live)) <= ended[-1].mean():
            break
        cache.reorder(torch.tensor(parents))
        newest = torch.tensor([beam.last[-1] for beam in live], device=logits.device)
        found = model.decode(newest[:, None], cache, logits="last")
        assert found is not None
        logits = found[:, : logits.shape[1]]
    yield from max([*ended, *live], key=Beam.mean).tail


def _grow(
    live: list[Beam], logits: Tensor, beams: int, has_ended: Callable[[tuple[int, ...]], bool], looks_at: int
) -> tuple[list[Beam], list[int], list[Beam]]:
    """The likeliest extensions by one token: (beams that continue, the index of each one's parent, beams that end)."""
    vocab = logits.shape[1]
    before = torch.tensor([beam.score for beam in live], dtype=torch.float64, device=logits.device)
    scores = (before[:, None] + logits.double().log_softmax(-1)).flatten()
    best = scores.topk(min(2 * beams, len(scores)))  # more than `beams`, because some may end
    grown, parents, ended = [], [], []
    for score, at in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        parent, token = divmod(at, vocab)
        old = live[parent]
        last = (*old.last, token)[-looks_at:]
        beam = Beam(score, old.length + 1, (*old.tail, token), last)
        if has_ended(last):
            ended.append(beam)
        elif len(grown) < beams:
            grown.append(beam)
            parents.append(parent)
    return grown, parents, ended


def _settled(beam: Beam) -> Beam:
    return Beam(beam.score, beam.length, beam.tail[1:], beam.last)
