"""Training objectives by kind of model and data: next token, pixels of images, answers of a task, target given its
source, or masked tokens.

An objective yields batches from streams that a checkpoint can resume, and scores a model on the validation split. All
objectives share one training loop. Shapes: B rows of this process, T tokens, N masked positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from spanformer.core.paths import expand_home
from spanformer.core.progress import OnCount
from spanformer.data import (
    Lanes,
    Pairs,
    PairStream,
    Pixels,
    Prepared,
    Task,
    TaskStream,
    mask_segments,
    mask_tokens,
    parse_task,
    texts_of,
)
from spanformer.model.encoder import Encoder
from spanformer.model.images import scan_order
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.model.stack import TransformerStack
from spanformer.train.config import RunConfig
from spanformer.train.evaluate import (
    Score,
    evaluate,
    evaluate_images,
    evaluate_masked,
    evaluate_pairs,
    evaluate_task,
    with_begin,
)
from spanformer.train.neighbours import read_neighbours
from spanformer.train.step import Batch


class Objective(Protocol):
    @property
    def stream(self) -> Lanes | PairStream | TaskStream: ...

    def draw(self) -> Batch: ...

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        """Score the model on the validation split."""
        ...


def make_objective(data: Prepared, config: RunConfig, rows: slice) -> Objective:
    """rows: this process's rows of a batch. Expects config.model.vocab to be set."""
    kind = config.model.kind
    if (task := parse_task(config.data.source)) is not None:
        return TaskAnswers(task, data, config, rows)
    if isinstance(data.vocab, Pixels):
        return Images(data.vocab, data, config, rows)
    if kind == "seq2seq":
        return Answers(data, config, rows)
    return NextToken(data, config, rows) if kind == "lm" else Masked(data, config, rows)


class NextToken:
    """Predict each token from those before it, in streams that continue from batch to batch."""

    def __init__(self, data: Prepared, config: RunConfig, rows: slice) -> None:
        t = config.train
        self.stream = Lanes(data.splits["train"].ids, t.batch, t.block, seed=t.seed, rows=rows)
        self.valid_ids = valid_ids(data, t.eval_tokens)
        self.config, self.valid, self.near = config, data.splits["valid"], None
        if k := config.model.neighbours:
            tokens = {"train": data.splits["train"].tokens, "valid": len(self.valid_ids)}
            self.near = {name: read_neighbours(Path(config.out), name, n, k) for name, n in tokens.items()}

    def draw(self) -> Batch:
        batch, t = next(self.stream), self.config.train
        arguments = {"x": torch.from_numpy(batch.x), "targets": torch.from_numpy(batch.y)}
        if self.near is not None:
            arguments["neighbours"] = self.near["train"].at(batch.starts, t.block)
        return Batch(arguments, t.batch * t.block, reset=batch.reset)

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        assert isinstance(model, LM)
        t, ids = self.config.train, self.valid_ids
        lanes = max(1, min(t.batch, len(ids) // (8 * t.block)))
        units = self.valid.units * len(ids) / self.valid.tokens
        return evaluate(
            model, ids, units=units, lanes=lanes, block=t.block, dtype=t.dtype,
            neighbours=None if self.near is None else self.near["valid"], on_progress=on_progress,
        )  # fmt: skip


class TaskAnswers:
    """Predict the answers of a task, each text from its start."""

    def __init__(self, task: Task, data: Prepared, config: RunConfig, rows: slice) -> None:
        t = config.train
        if config.model.kind != "lm":
            raise ValueError(
                f"data.source is the task {task.name}, and model.kind is {config.model.kind!r}; expected 'lm'"
            )
        if t.block < task.length:
            raise ValueError(
                f"train.block is {t.block}; a text of the task {task.name} has {task.length} tokens, so expected at "
                "least that"
            )
        train, self.valid = (texts_of(task, data.splits[name].ids, name) for name in ("train", "valid"))
        self.stream = TaskStream(train, t.batch, seed=t.seed, rows=rows)
        asked = t.eval_tokens // task.length if t.eval_tokens else len(self.valid)
        self.config, self.task, self.asked = config, task, max(1, asked)

    def draw(self) -> Batch:
        texts, counted = torch.from_numpy(next(self.stream)), torch.from_numpy(self.task.counted)
        tokens = self.config.train.batch * int(counted.sum())
        return Batch(
            {"x": texts[:, :-1], "targets": texts[:, 1:]}, tokens, counted=counted.expand(len(texts), -1), whole=True
        )

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        assert isinstance(model, LM)
        t, texts = self.config.train, self.valid[: self.asked]
        return evaluate_task(
            model, texts, self.task.counted, batch=t.batch, dtype=t.dtype, on_progress=on_progress
        )  # fmt: skip


class Images:
    """Predict each value of an image from those before it. The first follows the token that begins an image."""

    def __init__(self, pixels: Pixels, data: Prepared, config: RunConfig, rows: slice) -> None:
        t = config.train
        if t.block < pixels.values:
            raise ValueError(
                f"train.block is {t.block}; an image has {pixels.values} values ({pixels.height} × {pixels.width} "
                f"pixels of {pixels.channels}), so expected at least that"
            )
        self.pixels, self.config = pixels, config
        self.order = scan_order(config.model, pixels.height, pixels.line)
        self.stream = TaskStream(images_of(pixels, data.splits["train"].ids, "train"), t.batch, seed=t.seed, rows=rows)
        valid = images_of(pixels, data.splits["valid"].ids, "valid")
        self.valid = valid[: max(1, t.eval_tokens // pixels.values) if t.eval_tokens else None]

    def draw(self) -> Batch:
        images = torch.from_numpy(with_begin(self.pixels, next(self.stream)[:, self.order]))
        tokens = self.config.train.batch * self.pixels.values
        return Batch({"x": images[:, :-1], "targets": images[:, 1:]}, tokens, whole=True)

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        assert isinstance(model, LM)
        t = self.config.train
        return evaluate_images(
            model, self.pixels, self.valid, batch=t.batch, dtype=t.dtype, on_progress=on_progress
        )  # fmt: skip


class Masked:
    """Predict masked tokens from both sides of their context."""

    def __init__(self, data: Prepared, config: RunConfig, rows: slice) -> None:
        t = config.train
        self.stream = Lanes(data.splits["train"].ids, t.batch, t.block, seed=t.seed, rows=rows)
        self.valid_ids = valid_ids(data, t.eval_tokens)
        self.config, self.vocab = config, data.vocab.size
        self.segment = _segment(config) if t.cpc_mask_ratio else 0

    def draw(self) -> Batch:
        t, lanes, mask = self.config.train, self.stream, self.config.model.vocab - 1
        batch = next(lanes)
        # the mask depends only on the position in the text, so checkpoints need not save it
        seeds = [(t.seed, lanes.epoch, lanes.position, lane) for lane in lanes.rows]
        hidden = mask_tokens(batch.x, t.masked, vocab=self.vocab, mask=mask, seeds=seeds)
        arguments = {"x": hidden.x, "at": hidden.at, "targets": hidden.y}
        if t.cpc_mask_ratio:
            segments = np.broadcast_to(np.arange(batch.x.shape[1]) // self.segment, batch.x.shape)
            whole = mask_segments(batch.x, segments, t.cpc_mask_ratio, mask=mask, seeds=seeds, seen=hidden.x)
            arguments |= vars(whole)
        return Batch({name: torch.from_numpy(a) for name, a in arguments.items()}, t.batch * t.block)

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        assert isinstance(model, Encoder)
        t = self.config.train
        return evaluate_masked(
            model, self.valid_ids, share=t.masked, vocab=self.vocab, block=t.block, batch=t.batch, dtype=t.dtype,
            on_progress=on_progress,
        )  # fmt: skip


class Answers:
    """Predict the target of each pair from its source, token by token."""

    def __init__(self, data: Prepared, config: RunConfig, rows: slice) -> None:
        t = config.train
        self.pairs = {name: pairs_of(data, name, config) for name in ("train", "valid")}
        self.stream = PairStream(self.pairs["train"], t.batch, seed=t.seed, rows=rows)
        enough = int(np.searchsorted(self.pairs["valid"].lengths[:, 1].cumsum(), t.eval_tokens, "right"))
        self.config, self.asked = config, max(1, enough) if t.eval_tokens else len(self.pairs["valid"])

    def draw(self) -> Batch:
        batch = next(self.stream)
        names = {"source": "source", "x": "x", "targets": "y", "source_padding": "source_padding"}
        arguments = {name: torch.from_numpy(getattr(batch, field)) for name, field in names.items()}
        return Batch(arguments, batch.tokens, counted=~torch.from_numpy(batch.padding))

    def evaluate(self, model: TransformerStack, on_progress: OnCount | None = None) -> Score:
        assert isinstance(model, Seq2Seq)
        t = self.config.train
        return evaluate_pairs(
            model, self.pairs["valid"], limit=self.asked, batch=t.batch, dtype=t.dtype, on_progress=on_progress
        )


def _segment(config: RunConfig) -> int:
    """Tokens per global token (ETC's segment size); raises for a model without global tokens."""
    sizes = {int(spec.params.get("segment", 0)) for layer in config.model.layer_specs() for spec in layer}
    size = sizes.pop()
    if not size or sizes:
        raise ValueError(
            f"train.cpc_mask_ratio is {config.train.cpc_mask_ratio}, but not every layer has global tokens; expected "
            "model.attention.kind etc, or 0"
        )
    if config.train.block <= size:
        raise ValueError(
            f"train.cpc_mask_ratio masks whole segments of {size} tokens, but train.block is {config.train.block}; "
            "expected a longer train.block, of at least two segments"
        )
    return size


def pairs_of(data: Prepared, split: str, config: RunConfig) -> Pairs:
    if expand_home(config.data.source, "data.source").is_file():
        raise ValueError(
            f"data.source is the file {config.data.source}, whose splits may cut a pair in two; expected 'numbers', or "
            "a folder with files named train, valid and test"
        )
    vocab = config.model.vocab
    return Pairs(
        data.splits[split].ids, data.vocab, begin=vocab - 2, end=vocab - 1, longest=config.train.block, name=split
    )


def images_of(pixels: Pixels, ids: np.ndarray, name: str) -> np.ndarray:
    """[n, N] of a split's ids; an incomplete last image, which a limit may have cut, is dropped."""
    count = len(ids) // pixels.values
    if not count:
        raise ValueError(f"{name} has {len(ids)} values, and an image has {pixels.values}; raise data.limit")
    return ids[: count * pixels.values].reshape(count, pixels.values)


def valid_ids(data: Prepared, most: int) -> np.ndarray:
    """The tokens of the validation split; most: limit their number, 0: all."""
    ids = data.splits["valid"].ids
    ids = ids[:most] if most else ids
    if len(ids) < 2:
        raise ValueError(
            f"the validation split has {len(ids)} token; expected 2 or more: use more text, a larger data.valid or a "
            "larger train.eval_tokens"
        )
    return ids
