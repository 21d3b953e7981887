"""Beam search: the likeliest text that a search of this width finds.

Kept are the `beams` likeliest beginnings; each step tries every token after each of them. A beginning may end, by a
stop string or by the model's own end. The search is over when `beams` have ended and no other is likelier per
token than the worst of these, or when the text is long enough; the winner has the highest log-probability per token.
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
    """log-probability of all its tokens"""
    length: int = 0
    tail: tuple[int, ...] = ()
    """its last tokens, from the first on which the beams do not agree"""
    last: tuple[int, ...] = ()
    """its last tokens, as many as tell whether it has ended"""

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
    """Tokens of the winner, each as soon as all that may still win agree on it.

    logits [1, V]: what follows the text in the cache, which has one row now, and one for each beam afterwards.
    has_ended is asked of every beam's last `looks_at` tokens.
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
        found = model.read(newest[:, None], cache, logits="last")
        assert found is not None
        logits = found[:, : logits.shape[1]]
    yield from max([*ended, *live], key=Beam.mean).tail


def _grow(
    live: list[Beam], logits: Tensor, beams: int, has_ended: Callable[[tuple[int, ...]], bool], looks_at: int
) -> tuple[list[Beam], list[int], list[Beam]]:
    """The likeliest of all beams one token longer: those that go on, whose children they are, and those that end."""
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
