"""`spanformer eval CHECKPOINT --split test`: measure how well a language model predicts every token of a text, how many
sources an encoder–decoder answers exactly, how many masked tokens an encoder predicts, or how many answers of a task a
language model knows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress


@dataclass(frozen=True)
class EvalOptions:
    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    data: str = ""
    """a named corpus, a file, a folder or a glob; empty: the training corpus of the model"""
    copy: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a copy of the named corpus that is already on disk"""
    split: Literal["train", "valid", "test"] = "test"
    """split of the corpus"""
    protocol: Literal["every", "original"] = "every"
    """every: count each token once, in one stream; original: count as the adaptive-span paper's code does, with 8
    lanes and whole blocks only"""
    lanes: int = 0
    """number of parts of the text that are evaluated in parallel, each from its own start; 0: the protocol's default
    (1 or 8)"""
    block: int = 0
    """tokens per forward pass; 0: as in training"""
    limit: int = 0
    """evaluate only this many tokens (encoder–decoder: pairs); 0: all"""
    beams: int = 1
    """encoder–decoder only: above 1, search for each answer with this many beams"""
    rounds: int = 0
    """attention of kind lsh only: hash in this many rounds; 0: as in training"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: compute matrix products in bfloat16 (autocast)"""
    datastore: str = ""
    """folder of a datastore to mix in (spanformer datastore build, then fit)"""

    def __post_init__(self) -> None:
        for name in ("lanes", "block", "limit", "rounds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.datastore and self.dtype != "float32":
            raise ValueError(f"dtype is {self.dtype} with a datastore; expected float32, as its keys were made")
        if self.beams < 1:
            raise ValueError(f"beams is {self.beams}; expected 1 or more")


def run(options: EvalOptions) -> None:
    from spanformer.cli.eval_tasks import set_rounds
    from spanformer.cli.retrieval import used, with_datastore, with_neighbours
    from spanformer.core.events import UNIT_NAMES
    from spanformer.data import parse_task, prepare
    from spanformer.model.lm import LM
    from spanformer.model.load import load_any, load_meta
    from spanformer.train.evaluate import evaluate, evaluate_as_original

    with Progress() as report:
        report(f"loading {options.checkpoint}", 0, 0)
        meta, lm = load_meta(options.checkpoint), load_any(options.checkpoint)
        config = data_config(options, meta)
        if options.rounds:
            set_rounds(lm, options.rounds)
        data = prepare(config, on_progress=report, vocab=vocabulary(options, meta))
        check_vocabulary(meta, data.vocab.to_json(), lm.config.vocab, data.vocab.size)
        task = parse_task(config.source)
        if not isinstance(lm, LM) or task is not None or config.tokens == "pixel":
            print(_eval_answers(options, meta, lm, config, data, task, report))
            return
        split = data.splits[options.split]
        ids = split.ids[: options.limit] if options.limit else split.ids
        if options.lanes > len(ids):
            raise ValueError(f"lanes is {options.lanes}; expected at most {len(ids):,}, the tokens of the text")
        block = min(options.block, len(ids)) or (meta.get("config", {}).get("train", {}).get("block") or 512)
        units = split.units * len(ids) / split.tokens
        read = functools.partial(report, f"reading {options.split}")
        if lm.config.neighbours and options.split == "train" and not options.data:
            raise ValueError(
                "split is 'train', whose tokens would find themselves as neighbours; expected another split"
            )
        found = with_neighbours(lm, meta, options.checkpoint)
        with found, with_datastore(lm, data.vocab, options.datastore, options.checkpoint) as retrieval:
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
        print(f"{score.bits:.4f} bits per {UNIT_NAMES[data.unit]}")
    for line in used(retrieval):
        print(line)
    unknown = 0 if data.vocab.unknown is None or not options.data else int((ids == data.vocab.unknown).sum())
    if unknown:
        print(f"{unknown:,} of the tokens are not in the model's vocabulary; they count as its unknown token")


def _eval_answers(options: EvalOptions, meta: dict, lm, config, data, task, report) -> str:
    """The result of a model or a text whose answers are counted, not every token."""
    from spanformer.cli.eval_tasks import eval_encoder, eval_images, eval_pairs, eval_task
    from spanformer.model.lm import LM
    from spanformer.model.seq2seq import Seq2Seq

    streams = options.protocol != "every" or options.lanes
    if isinstance(lm, LM):
        if streams:
            what = "images" if task is None else f"the task {task.name}"
            raise ValueError(f"the data is {what}; --protocol and --lanes are for streams of text")
        return eval_images(lm, data, options, report) if task is None else eval_task(lm, task, data, options, report)
    if streams:
        raise ValueError(f"the model is of kind {lm.config.kind!r}; --protocol and --lanes are for language models")
    trained = replace(run_config(meta, options.checkpoint), data=config)
    if isinstance(lm, Seq2Seq):
        return eval_pairs(lm, data, trained, options, report)
    return eval_encoder(lm, data, trained, options, report)


def data_config(options: EvalOptions, meta: dict):
    """The data section the model was trained with, or the same with the text of --data and --from."""
    from spanformer.core.fields import build
    from spanformer.data.config import DataConfig

    known = meta.get("config", {}).get("data")
    config = build(DataConfig, known, options.checkpoint) if known else DataConfig()
    if not known and not options.data:
        raise ValueError(f"{options.checkpoint} does not record its training data; give a text with --data")
    if options.data:
        config = replace(config, source=options.data, copy="", limit=0)
    return replace(config, copy=options.copy) if options.copy else config


def vocabulary(options: EvalOptions, meta: dict):
    """The model's vocabulary for a text given by --data; None for the training corpus, which has its own, and for
    bytes."""
    from spanformer.data.vocab import Bytes, from_json

    if not options.data or not isinstance(meta.get("vocab"), dict):
        return None
    found = from_json(meta["vocab"])
    return None if isinstance(found, Bytes) else found


def run_config(meta: dict, checkpoint: str):
    from spanformer.core.fields import build
    from spanformer.train.config import RunConfig

    if not isinstance(meta.get("config"), dict):
        raise ValueError(
            f"{checkpoint} does not record its run config; expected the folder of a run, or one of its checkpoints"
        )
    return build(RunConfig, meta["config"], checkpoint)


def check_vocabulary(meta: dict, now: object, known: int, size: int) -> None:
    then = meta.get("vocab")
    if then is None and size != known:
        raise ValueError(
            f"the model has no vocabulary for its {known:,} tokens; expected {size:,} tokens, which would be read as "
            "bytes"
        )
    if then is not None and then != now:
        raise ValueError(
            f"the text's vocabulary of {size:,} tokens is not the model's of {known:,}; the training corpus has changed"
        )


EVAL = Command(EvalOptions, run)
