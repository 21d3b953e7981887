"""`spanformer eval CHECKPOINT --split test`: how well a model predicts a text, every token of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from spanformer.cli.leaf import Leaf
from spanformer.cli.waiting import waiting


@dataclass(frozen=True)
class EvalOptions:
    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    data: str = ""
    """a named corpus, a file, a folder or a glob; empty: what the model was trained on"""
    copy: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a copy of the named corpus that is already on disk"""
    split: Literal["train", "valid", "test"] = "test"
    protocol: Literal["every", "original"] = "every"
    """every: each token counted once, in one stream; original: as the adaptive-span paper's code does, 8 lanes, whole
    blocks only"""
    lanes: int = 0
    """how many parts of the text are read side by side, each from its own start; 0: as the protocol says (1 or 8)"""
    block: int = 0
    """tokens read at once; 0: as in training"""
    limit: int = 0
    """read only so many tokens; 0: all"""
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name in ("lanes", "block", "limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")


def run(options: EvalOptions) -> None:
    from spanformer.data import prepare
    from spanformer.model.load import load, load_meta
    from spanformer.train.evaluate import evaluate, evaluate_as_original

    meta, lm = load_meta(options.checkpoint), load(options.checkpoint)
    config = data_config(options, meta)
    with waiting() as tell:
        data = prepare(config, on_progress=tell)
        check_vocabulary(meta, data.vocab.to_json(), lm.config.vocab, data.vocab.size)
        split = data.splits[options.split]
        ids = split.ids[: options.limit] if options.limit else split.ids
        block = options.block or (meta.get("config", {}).get("train", {}).get("block") or 512)
        units = split.units * len(ids) / split.tokens
        if options.protocol == "original":
            score = evaluate_as_original(lm, ids, block=block, lanes=options.lanes or 8)
        else:
            score = evaluate(
                lm, ids, units=units, lanes=options.lanes or 1, block=block, dtype=options.dtype,
                on_progress=lambda done, total: tell(f"reading {options.split}", done, total),
            )  # fmt: skip
    print(
        f"{options.split}: {score.loss / math.log(2):.4f} bits per token, perplexity {score.perplexity:.2f} "
        f"({score.tokens:,} of {len(ids):,} tokens)"
    )
    if options.protocol == "every":
        print(f"{score.bits:.4f} bits per {data.unit}")


def data_config(options: EvalOptions, meta: dict):
    """What the model was trained on, or what is asked for instead, in the tokens it knows."""
    from spanformer.data.config import DataConfig
    from spanformer.model.fields import build

    known = meta.get("config", {}).get("data")
    config = build(DataConfig, known, options.checkpoint) if known else DataConfig()
    if not known and not options.data:
        raise ValueError(f"{options.checkpoint} does not say what it was trained on; name a text with --data")
    if options.data:
        config = replace(config, source=options.data, copy="", limit=0)
    return replace(config, copy=options.copy) if options.copy else config


def check_vocabulary(meta: dict, now: object, known: int, size: int) -> None:
    then = meta.get("vocab")
    if (then is not None and then != now) or (then is None and size > known):
        raise ValueError(
            f"the text's vocabulary of {size:,} tokens is not the model's of {known:,}; choose a text prepared in the "
            "same way, or bytes"
        )


EVAL = Leaf(EvalOptions, run)
