"""Evaluate exact matches of an encoder–decoder, masked tokens of an encoder, answers of a task, or images."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from spanformer.attention import LSH
from spanformer.core.progress import OnProgress
from spanformer.core.text import printable
from spanformer.data import Pixels, Prepared, Task, texts_of
from spanformer.infer import answer
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.model.stack import TransformerStack
from spanformer.train.config import RunConfig
from spanformer.train.evaluate import Score, evaluate_images, evaluate_masked, evaluate_pairs, evaluate_task
from spanformer.train.objective import images_of, pairs_of

if TYPE_CHECKING:
    from spanformer.cli.eval import EvalOptions

BATCH = 128  # pairs at a time
SHOWN = 3  # wrong answers


def eval_pairs(model: Seq2Seq, data: Prepared, config: RunConfig, options: EvalOptions, report: OnProgress) -> str:
    """Generate every answer token by token and compare it with the target."""
    pairs = pairs_of(data, options.split, config)
    asked = min(options.limit or len(pairs), len(pairs))
    longest, wrong = int(pairs.lengths[:, 1].max()), []
    for at in range(0, asked, BATCH):
        rows = range(at, min(at + BATCH, asked))
        texts = [pairs.texts(row) for row in rows]
        sources = [source.astype(np.int64) for source, _ in texts]
        answers = answer(model, sources, max_tokens=longest, beams=options.beams)
        for (source, target), found in zip(texts, answers, strict=True):
            if found != target.tolist():
                wrong.append(tuple(data.vocab.decode(ids) for ids in (source, found, target)))
        report(f"answering {options.split}", rows.stop, asked)
    score = evaluate_pairs(
        model, pairs, limit=asked, batch=BATCH, dtype=options.dtype,
        on_progress=functools.partial(report, f"reading {options.split}"),
    )  # fmt: skip
    right, how = asked - len(wrong), "greedy decoding" if options.beams == 1 else f"{options.beams} beams"
    lines = [
        f"{options.split}: exact match {100 * right / asked:.2f} % ({right:,} of {asked:,} pairs; {how})",
        _bits(score, "target"),
    ]
    lines += [f"wrong: {printable(source)} → {found!r}, expected {target!r}" for source, found, target in wrong[:SHOWN]]
    return "\n".join(lines)


def eval_encoder(model: Encoder, data: Prepared, config: RunConfig, options: EvalOptions, report: OnProgress) -> str:
    ids = data.splits[options.split].ids
    ids = ids[: options.limit] if options.limit else ids
    t = config.train
    score = evaluate_masked(
        model, ids, share=t.masked, vocab=data.vocab.size, block=options.block or t.block, batch=t.batch,
        dtype=options.dtype, on_progress=functools.partial(report, f"reading {options.split}"),
    )  # fmt: skip
    assert score.exact is not None
    right = f"{options.split}: {100 * score.exact:.2f} % of {score.tokens:,} masked tokens right"
    return f"{right}\n{_bits(score, 'masked')}"


def eval_task(model: LM, task: Task, data: Prepared, options: EvalOptions, report: OnProgress) -> str:
    """Every answer, given the correct tokens before it."""
    texts = texts_of(task, data.splits[options.split].ids, options.split)
    if options.limit:
        texts = texts[: max(1, options.limit // task.length)]
    score = evaluate_task(
        model, texts, task.counted, dtype=options.dtype,
        on_progress=functools.partial(report, f"reading {options.split}"),
    )  # fmt: skip
    assert score.exact is not None
    right = f"{options.split}: {100 * score.exact:.2f} % of {score.tokens:,} answers right"
    return f"{right}\n{_bits(score, 'answer')}"


def eval_images(model: LM, data: Prepared, options: EvalOptions, report: OnProgress) -> str:
    """Every value of every image, given those before it."""
    assert isinstance(data.vocab, Pixels)
    images = images_of(data.vocab, data.splits[options.split].ids, options.split)
    if options.limit:
        images = images[: max(1, options.limit // data.vocab.values)]
    read = functools.partial(report, f"reading {options.split}")
    score = evaluate_images(model, data.vocab, images, dtype=options.dtype, on_progress=read)
    return f"{options.split}: {score.bits:.4f} bits per dimension ({score.tokens:,} values of {len(images):,} images)"


def set_rounds(model: TransformerStack, rounds: int) -> None:
    """Hash in this many rounds in every LSH head."""
    found = [module for module in model.modules() if isinstance(module, LSH)]
    if not found:
        raise ValueError(f"rounds is {rounds}, and the model has no attention of kind lsh; expected 0")
    for mechanism in found:
        mechanism.set_rounds(rounds)


def _bits(score: Score, asked: str) -> str:
    return f"{score.loss / math.log(2):.4f} bits per {asked} token, perplexity {score.perplexity:.2f}"
