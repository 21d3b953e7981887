"""`spanformer score CHECKPOINT FILE`: compute the bits per character of a file, in total and token by token."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import tyro

from spanformer.cli.command import Command

if TYPE_CHECKING:
    from spanformer.data import Vocab
    from spanformer.infer import Scored


@dataclass(frozen=True)
class ScoreOptions:
    """Compute how well a model predicts a file, in bits per character: lower is better.

    For example:  spanformer score out/demo setup.py --jsonl tokens.jsonl
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    file: tyro.conf.Positional[str]
    """any file, of any length; -: standard input"""
    jsonl: str = ""
    """write a line for every token to this file: {"at": its number, "id": …, "text": …, "bits": …}; -: standard output
    (the totals then go to standard error)"""
    chunk: int = 512
    """tokens per forward pass"""
    datastore: str = ""
    """folder of a datastore to mix in (spanformer datastore build, then fit)"""


def run(options: ScoreOptions) -> None:
    from spanformer.cli.progress import Progress
    from spanformer.cli.retrieval import used, with_datastore, with_neighbours
    from spanformer.cli.text_input import TextFile, model_vocabulary
    from spanformer.infer import score
    from spanformer.model.load import load, load_meta

    file = TextFile(options.file)
    nats, tokens, unknown, rate = 0.0, 0, 0, 0.0
    with Progress(transient=True) as report, _lines(options.jsonl) as lines:
        report(f"loading {options.checkpoint}", 0, 0)
        meta, lm = load_meta(options.checkpoint), load(options.checkpoint)
        vocab = model_vocabulary(meta, options.checkpoint)
        start = time.perf_counter()
        found = with_neighbours(lm, meta, options.checkpoint)
        with found, with_datastore(lm, vocab, options.datastore, options.checkpoint) as retrieval:
            for scored in score(lm, vocab.stream(file.parts(vocab)), chunk=options.chunk):
                if lines is not None:
                    lines.writelines(_rows(scored, tokens, vocab))
                tokens += len(scored.ids)
                nats += float(scored.nats.sum())
                unknown += 0 if vocab.unknown is None else int((scored.ids == vocab.unknown).sum())
                rate = tokens / (time.perf_counter() - start)
                title = f"{file.name} · {nats / tokens / math.log(2):.3f} bits per token · {rate:,.0f} tokens/s"
                report(title, file.done, file.size)
    if not tokens:
        raise ValueError(f"{file.name} is empty; expected some text")
    bits = nats / math.log(2)
    out = sys.stderr if options.jsonl == "-" else sys.stdout
    print(f"{bits / file.characters:.4f} bits per character, {bits / file.done:.4f} per byte", file=out)
    print(
        f"{tokens:,} tokens ({file.characters:,} characters, {file.done:,} bytes) at {rate:,.0f} tokens/s; "
        f"{bits / tokens:.4f} bits per token, perplexity {math.exp(min(nats / tokens, 700)):.2f}",
        file=out,
    )
    for line in used(retrieval):
        print(line, file=out)
    if unknown:
        print(f"{unknown:,} of the tokens are not in the model's vocabulary; they count as its unknown token", file=out)


@contextlib.contextmanager
def _lines(path: str) -> Iterator[TextIO | None]:
    if path == "-":
        yield sys.stdout
    elif path:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    else:
        yield None


def _rows(scored: Scored, at: int, vocab: Vocab) -> Iterator[str]:
    for n, (token, nats) in enumerate(zip(scored.ids.tolist(), scored.nats.tolist(), strict=True)):
        row = {"at": at + n, "id": token, "text": vocab.decode([token]), "bits": round(nats / math.log(2), 6)}
        yield json.dumps(row, ensure_ascii=False) + "\n"


SCORE = Command(ScoreOptions, run)
