"""What is tortured beside the command line's own commands: a run without its report, and KV caches that are saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from spanformer.memory.cache import Cache
from support.small_models import SMALL, make, text

ROUNDS, TOKENS = 30, 3


def train_only(arguments: Sequence[str]) -> None:
    """`spanformer train` without the report that it ends with, which takes longer than all the rest."""
    from spanformer.cli.train import parse
    from spanformer.train.run import train

    train(parse("spanformer train", list(arguments)))


def save_caches(arguments: Sequence[str]) -> None:
    """Read a text, and save the KV cache after every few tokens; goes on from the file where there is one. The last
    predictions go to the second path."""
    path, last = Path(arguments[0]), Path(arguments[1])
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    lm, ids = make(SMALL), text(2, ROUNDS * TOKENS)
    cache = Cache.load(path, lm) if path.exists() else lm.cache(2, slack=2)
    found = None
    for start in range(int(cache.seen[0]), ROUNDS * TOKENS, TOKENS):
        found = lm.decode(ids[:, start : start + TOKENS], cache)
        cache.save(path)
    if found is not None:
        last.write_bytes(found.numpy().tobytes())


JOBS: dict[str, Callable[[Sequence[str]], None]] = {"train-only": train_only, "save-caches": save_caches}


def run(job: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """A mistake ends as on the command line."""
    try:
        job(arguments)
    except (OSError, ValueError) as error:
        print("spanformer: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
