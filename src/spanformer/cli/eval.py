"""`spanformer eval CHECKPOINT --split test`: how well a model predicts a text, every token of it; how many sources an
encoder–decoder answers exactly; how many masked tokens an encoder guesses."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from spanformer.cli.leaf import Leaf
from spanformer.cli.progress import Progress


@dataclass(frozen=True)
class EvalOptions:
    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    data: str = ""
    """a named corpus, a file, a folder or a glob; empty: what the model was trained on"""
    copy: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a copy of the named corpus that is already on disk"""
    split: Literal["train", "valid", "test"] = "test"
    """which part of the text"""
    protocol: Literal["every", "original"] = "every"
    """every: each token counted once, in one stream; original: as the adaptive-span paper's code does, 8 lanes, whole
    blocks only"""
    lanes: int = 0
    """how many parts of the text are read side by side, each from its own start; 0: as the protocol says (1 or 8)"""
    block: int = 0
    """tokens read at once; 0: as in training"""
    limit: int = 0
    """read only so many tokens, or pairs of an encoder–decoder; 0: all"""
    beams: int = 1
    """of an encoder–decoder: above 1, search for each answer with so many beams"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: products in bfloat16 (autocast)"""

    def __post_init__(self) -> None:
        for name in ("lanes", "block", "limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.beams < 1:
            raise ValueError(f"beams is {self.beams}; expected 1 or more")


def run(options: EvalOptions) -> None:
    from spanformer.cli.eval_others import eval_encoder, eval_pairs
    from spanformer.cli.screen import UNITS
    from spanformer.data import prepare
    from spanformer.model.lm import LM
    from spanformer.model.load import load_any, load_meta
    from spanformer.model.seq2seq import Seq2Seq
    from spanformer.train.evaluate import evaluate, evaluate_as_original

    with Progress() as report:
        report(f"loading {options.checkpoint}", 0, 0)
        meta, lm = load_meta(options.checkpoint), load_any(options.checkpoint)
        config = data_config(options, meta)
        data = prepare(config, on_progress=report, vocab=vocabulary(options, meta))
        check_vocabulary(meta, data.vocab.to_json(), lm.config.vocab, data.vocab.size)
        if not isinstance(lm, LM):
            if options.protocol != "every" or options.lanes:
                raise ValueError(
                    f"the model is of kind {lm.config.kind!r}; --protocol and --lanes are for language models"
                )
            trained = replace(run_config(meta, options.checkpoint), data=config)
            if isinstance(lm, Seq2Seq):
                print(eval_pairs(lm, data, trained, options, report))
            else:
                print(eval_encoder(lm, data, trained, options, report))
            return
        split = data.splits[options.split]
        ids = split.ids[: options.limit] if options.limit else split.ids
        if options.lanes > len(ids):
            raise ValueError(f"lanes is {options.lanes}; the text has {len(ids):,} tokens, so expected at most that")
        block = min(options.block, len(ids)) or (meta.get("config", {}).get("train", {}).get("block") or 512)
        units = split.units * len(ids) / split.tokens
        read = functools.partial(report, f"reading {options.split}")
        if options.protocol == "original":
            score = evaluate_as_original(
                lm, ids, block=block, lanes=options.lanes or 8, dtype=options.dtype, on_progress=read,
            )  # fmt: skip
        else:
            score = evaluate(
                lm, ids, units=units, lanes=options.lanes or 1, block=block, dtype=options.dtype, on_progress=read,
            )  # fmt: skip
    print(
        f"{options.split}: {score.loss / math.log(2):.4f} bits per token, perplexity {score.perplexity:.2f} "
        f"({score.tokens:,} of {len(ids):,} tokens)"
    )
    if options.protocol == "every":
        print(f"{score.bits:.4f} bits per {UNITS.get(data.unit, data.unit)}")
    unknown = 0 if data.vocab.unknown is None or not options.data else int((ids == data.vocab.unknown).sum())
    if unknown:
        print(f"the model does not know {unknown:,} of the tokens; they count as its one unknown token")


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


def vocabulary(options: EvalOptions, meta: dict):
    """The model's own for a text it was not trained on; None: that of the text, which is the model's then, or bytes."""
    from spanformer.data.vocab import Bytes, from_json

    if not options.data or not isinstance(meta.get("vocab"), dict):
        return None
    found = from_json(meta["vocab"])
    return None if isinstance(found, Bytes) else found


def run_config(meta: dict, checkpoint: str):
    from spanformer.model.fields import build
    from spanformer.train.config import RunConfig

    if not isinstance(meta.get("config"), dict):
        raise ValueError(
            f"{checkpoint} does not say how it was trained; expected a run's folder, or a checkpoint of one"
        )
    return build(RunConfig, meta["config"], checkpoint)


def check_vocabulary(meta: dict, now: object, known: int, size: int) -> None:
    then = meta.get("vocab")
    if then is None and size != known:
        raise ValueError(
            f"the model does not say which text its {known:,} tokens stand for; only one of {size:,} tokens could be "
            "taken for a model of bytes"
        )
    if then is not None and then != now:
        raise ValueError(
            f"the text's vocabulary of {size:,} tokens is not the model's of {known:,}; the text it was trained on has "
            "changed"
        )


EVAL = Leaf(EvalOptions, run)
