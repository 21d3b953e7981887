"""Generation from prompts: text or tokens, by sampling or beam search.

Shapes: B rows (prompts), V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.infer.beam import beam_search
from spanformer.infer.counts import check_counts
from spanformer.infer.decode import Chooser, Guesser, Piece, Row, decode
from spanformer.infer.draft import Draft, EarlyExit
from spanformer.infer.lookup import KEPT, Lookup
from spanformer.infer.prompt import OnRead, Prompt, last_tokens, matters, parts_of, read_prompts
from spanformer.infer.sampling import Sampling
from spanformer.infer.text import Vocabulary, Writer, check_stop
from spanformer.memory.cache import Cache
from spanformer.model.lm import LM

BEFORE = 8  # last tokens of the prompt given to the detokenizer as context


def generate(
    model: LM,
    prompt: Prompt,
    *,
    vocab: Vocabulary | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    beams: int = 1,
    lookup: int = 0,
    draft: Draft | None = None,
    chunk: int = 512,
    cache: Cache | None = None,
    on_read: OnRead | None = None,
) -> Iterator[Piece]:
    """Generate the continuation of a prompt, token by token.

    prompt: a text, ids [T], or an iterator over arrays of ids, of any total length.
    vocab: a vocabulary of `spanformer.data`; without one, prompts are ids and pieces have no text.
    stop: stop strings; not included in the output.
    seed: makes the text reproducible; None: random.
    beams: above 1, use beam search instead of sampling.
    lookup: guess up to this many tokens where the text repeats itself and check them in one step; changes the speed,
        not the tokens.
    draft: guess tokens by leaving the layers early and check them in one step, for a model with exits; as with lookup.
    chunk: tokens of the prompt per forward pass.
    cache: KV cache of the text to continue, with one row and slack for every guess; None: a new one.
    on_read: called with (tokens read so far, all tokens to read) while the prompt is read.
    """
    return generate_batch(
        model, [prompt], vocab=vocab, max_tokens=max_tokens, sampling=sampling, stop=stop, seed=seed, beams=beams,
        lookup=lookup, draft=draft, chunk=chunk, cache=cache, on_read=on_read,
    )  # fmt: skip


def generate_batch(
    model: LM,
    prompts: Sequence[Prompt],
    *,
    vocab: Vocabulary | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    beams: int = 1,
    lookup: int = 0,
    draft: Draft | None = None,
    chunk: int = 512,
    cache: Cache | None = None,
    on_read: OnRead | None = None,
) -> Iterator[Piece]:
    """Generate continuations of several prompts of any lengths; each piece names its row.

    A row's text does not depend on the others: row b is sampled as if alone with seed + b. beams and lookup accept one
    prompt only. For the other arguments see `generate`.
    """
    if not prompts:
        raise ValueError("prompts is empty; expected one or more")
    check_counts(max_tokens=max_tokens, beams=beams, lookup=lookup, chunk=chunk)
    if beams > 1 and sampling is not None:
        raise ValueError(f"beams is {beams}, and beam search does not sample; omit sampling, or use 1 beam")
    if beams > 1 and lookup:
        raise ValueError(f"beams is {beams} and lookup is {lookup}; expected one of the two")
    if draft is not None and (beams > 1 or lookup):
        raise ValueError(f"draft is {draft} with {beams} beams and a lookup of {lookup}; expected one of the three")
    if len(prompts) > 1 and (named := "beams" * (beams > 1) + "lookup" * (lookup > 0) + "draft" * (draft is not None)):
        raise ValueError(f"{named} takes one prompt at a time; got {len(prompts)}")
    check_stop(stop, vocab)
    settings = _Settings(model, vocab, max_tokens, sampling or Sampling(), tuple(stop), seed, chunk, on_read)
    rows = settings.rows(prompts, KEPT if lookup else 0)
    most, name = (lookup, "lookup") if draft is None else (draft.tokens, "draft.tokens")
    cache = settings.cache(len(rows), cache, most, name)
    if beams > 1:
        return _search(settings, rows, cache, beams)
    guesser = Lookup() if lookup else None
    if draft is not None:
        guesser = EarlyExit(model, cache, draft, settings.size)
    return _decode(settings, rows, cache, guesser, most)


@dataclass(frozen=True)
class _Settings:
    model: LM
    vocab: Vocabulary | None
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    seed: int | None
    chunk: int
    on_read: OnRead | None

    def __post_init__(self) -> None:
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 1 << 63):
            raise ValueError(f"seed is {self.seed}; expected 0 … 2⁶³ − 1")

    @property
    def size(self) -> int:
        """Number of tokens to choose from: a model may have more ids than its vocabulary."""
        limit = self.model.config.vocab
        return limit if self.vocab is None else min(limit, self.vocab.size)

    def rows(self, prompts: Sequence[Prompt], least: int) -> list[Row]:
        """least: keep this many tokens of each prompt even if fewer affect the output."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        most = max(least, matters(self.model), self.sampling.repetition_window)
        rows = []
        for index, prompt in enumerate(prompts):
            ids = last_tokens(parts_of(prompt, self.vocab, self.size), most)
            if not len(ids):
                which = "the prompt" if len(prompts) == 1 else f"prompt {index + 1}"
                raise ValueError(f"{which} is empty; expected at least one token")
            decoder = None if self.vocab is None else self.vocab.detokenizer(ids[-BEFORE:].tolist())
            random = torch.Generator().manual_seed((seed + index) % (1 << 63))
            rows.append(Row(index, ids, Writer(decoder, self.stop), random))
        return rows

    def cache(self, rows: int, given: Cache | None, slack: int, name: str) -> Cache:
        """name: of the argument that needs the slack."""
        if given is None:
            return self.model.cache(rows, slack=slack)
        if given.batch != rows:
            raise ValueError(f"the KV cache has {given.batch} rows; expected one for each prompt, {rows}")
        if given.slack < slack:
            raise ValueError(
                f"{name} is {slack}, but the KV cache has a slack of {given.slack} tokens; expected a slack of "
                f"{slack} or more"
            )
        return given

    def read(self, rows: list[Row], cache: Cache) -> Tensor:
        """[B, V] logits of the first new tokens."""
        most = matters(self.model)
        logits = read_prompts(self.model, [row.ids[-most:] for row in rows], cache, self.chunk, self.on_read)
        if not bool(logits.isfinite().all()):
            raise ValueError("the model's predictions are not finite numbers; its weights are damaged")
        return logits[:, : self.size]


def _decode(
    settings: _Settings, rows: list[Row], cache: Cache, guesser: Guesser | None, most: int
) -> Iterator[Piece]:  # fmt: skip
    logits = settings.read(rows, cache)
    chooser = Chooser(rows, settings.sampling, settings.size, logits.device, guesser, most)
    yield from decode(settings.model, cache, logits, chooser, settings.max_tokens)


def _search(settings: _Settings, rows: list[Row], cache: Cache, beams: int) -> Iterator[Piece]:
    row, vocab, stop = rows[0], settings.vocab, settings.stop
    looks_at = 4 + max((len(text.encode()) for text in stop), default=0)  # tokens; each has a byte or more

    def has_ended(last: tuple[int, ...]) -> bool:
        if not stop or vocab is None:
            return False
        writer = Writer(vocab.detokenizer(), stop)
        for token in last:
            writer.add(token)
        writer.finish()
        return writer.stopped

    logits = settings.read(rows, cache)
    waiting: int | None = None  # hold one token back: the last one also carries the remaining text
    for token in beam_search(settings.model, cache, logits, beams, settings.max_tokens, has_ended, looks_at):
        if waiting is not None:
            yield row.write(waiting, False)
        waiting = token
    if waiting is not None:
        yield row.write(waiting, True)
