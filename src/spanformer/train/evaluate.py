"""Evaluation: the loss of a model on a text that is read as a stream, every token counted once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.core.progress import OnCount
from spanformer.data import Pairs, Pixels, every_token, mask_tokens
from spanformer.model.encoder import Encoder
from spanformer.model.images import scan_order
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.model.stack import TransformerStack
from spanformer.train.neighbours import Neighbours
from spanformer.train.step import autocast


class Score(NamedTuple):
    nats: float
    """sum over all tokens"""
    tokens: int
    units: float
    """bytes, characters or words of the text"""
    exact: float | None = None
    """share predicted exactly: whole targets of pairs, masked tokens, or answers of a task"""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits(self) -> float:
        """Bits per byte, character or word."""
        return self.nats / self.units / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: LM,
    ids: np.ndarray,
    *,
    units: float | None = None,
    lanes: int = 1,
    block: int = 256,
    dtype: str = "float32",
    neighbours: Neighbours | None = None,
    on_progress: OnCount | None = None,
) -> Score:
    """Score ids as `lanes` contiguous parts in parallel, each with its own segment memory, empty at its start.

    The first token of the text has no context and is counted as a uniform guess. units: bytes, characters or words
    of the text; None: one per token. neighbours: of each token, for a model that mixes them in.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    counted, state = 1, None
    with _not_training(model):
        for part in every_token(ids, lanes, block):
            x, y = (torch.from_numpy(a).to(device) for a in (part.x, part.y))
            mask = torch.from_numpy(part.counted).to(device)
            near = None if neighbours is None else neighbours.at(part.starts, x.shape[1]).to(device)
            with autocast(dtype, device):
                found = model(x, None if part.reset else state, targets=y, neighbours=near)
            state = found.state
            total += (found.nll.double() * mask).sum()
            counted += int(part.counted.sum())
            if on_progress is not None:
                on_progress(counted, len(ids))
    nats = float(total) + math.log(model.config.vocab)
    return Score(nats, counted, len(ids) if units is None else units)


@torch.no_grad()
def evaluate_as_original(
    model: LM, ids: np.ndarray, *, block: int, lanes: int = 8, dtype: str = "float32",
    on_progress: OnCount | None = None,
) -> Score:  # fmt: skip
    """The protocol of the adaptive-span paper's code: lanes of equal length, whole blocks only, a mean over blocks.

    Skips each lane's first token and the last tokens that do not fill a block.
    """
    device = next(model.parameters()).device
    length = len(ids) // lanes
    if length <= block:
        raise ValueError(
            f"the split has {len(ids):,} tokens; expected more than {lanes} lanes of one block each, {lanes * block:,}"
        )
    rows = ids[: lanes * length].reshape(lanes, length)
    total, state = torch.zeros((), dtype=torch.float64, device=device), None
    starts = range(0, length - block, block)
    with _not_training(model):
        for at in starts:
            piece = torch.from_numpy(rows[:, at : at + block + 1].astype(np.int64)).to(device)
            with autocast(dtype, device):
                found = model(piece[:, :-1], state, targets=piece[:, 1:])
            state = found.state
            total += found.nll.double().sum()
            if on_progress is not None:
                on_progress(lanes * (at + block), len(ids))
    tokens = len(starts) * lanes * block
    return Score(float(total), tokens, tokens)


@torch.no_grad()
def evaluate_pairs(
    model: Seq2Seq, pairs: Pairs, *, limit: int = 0, batch: int = 64, dtype: str = "float32",
    on_progress: OnCount | None = None,
) -> Score:  # fmt: skip
    """Score the targets of the first `limit` pairs (0: all), given their sources.

    A target is exact if each of its tokens, the end token included, is the argmax given the correct tokens before it:
    exactly then greedy decoding produces this target.
    """
    device = next(model.parameters()).device
    total, right, tokens = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    asked = np.arange(limit or len(pairs))
    # batch targets of similar length
    order = asked[np.argsort(pairs.lengths[: len(asked), 1], kind="stable")]
    with _not_training(model):
        for at in range(0, len(order), batch):
            part = pairs.batch(order[at : at + batch])
            source, hidden, x, y, padding = (
                torch.from_numpy(a).to(device) for a in (part.source, part.source_padding, part.x, part.y, part.padding)
            )
            with autocast(dtype, device):
                logits = model(source, x, source_padding=hidden).logits
            total += (_nll(logits, y) * ~padding).sum()
            right += int(((logits.argmax(-1) == y) | padding).all(1).sum())
            tokens += part.tokens
            if on_progress is not None:
                on_progress(min(at + batch, len(order)), len(order))
    return Score(float(total), tokens, tokens, right / len(order))


@torch.no_grad()
def evaluate_task(
    model: LM, texts: np.ndarray, counted: np.ndarray, *, batch: int = 64, dtype: str = "float32",
    on_progress: OnCount | None = None,
) -> Score:  # fmt: skip
    """Score the answers of a task's texts [N, T], each text from its start. counted [T − 1]: where the next token is an
    answer."""
    device = next(model.parameters()).device
    total, right, at = torch.zeros((), dtype=torch.float64, device=device), 0, torch.from_numpy(np.flatnonzero(counted))
    with _not_training(model):
        for first in range(0, len(texts), batch):
            some = torch.from_numpy(texts[first : first + batch].astype(np.int64)).to(device)
            y = some[:, 1:][:, at]
            with autocast(dtype, device):
                found = model(some[:, :-1]).logits
            assert found is not None
            logits = found[:, at]
            total += _nll(logits, y).sum()
            right += int((logits.argmax(-1) == y).sum())
            if on_progress is not None:
                on_progress(min(first + batch, len(texts)), len(texts))
    tokens = len(texts) * len(at)
    return Score(float(total), tokens, tokens, right / tokens)


def evaluate_images(
    model: LM, pixels: Pixels, images: np.ndarray, *, batch: int = 64, dtype: str = "float32",
    on_progress: OnCount | None = None,
) -> Score:  # fmt: skip
    """Score every value of images [n, N] in raster order: bits per dimension."""
    every, order = np.ones(pixels.values, dtype=bool), scan_order(model.config, pixels.height, pixels.line)
    texts = with_begin(pixels, images[:, order])
    found = evaluate_task(model, texts, every, batch=batch, dtype=dtype, on_progress=on_progress)
    return found._replace(exact=None)


def with_begin(pixels: Pixels, images: np.ndarray) -> np.ndarray:
    """[n, 1 + N] int64: the token that begins an image, and its values."""
    return np.pad(images.astype(np.int64), ((0, 0), (1, 0)), constant_values=pixels.begin)


@torch.no_grad()
def evaluate_masked(
    model: Encoder, ids: np.ndarray, *, share: float, vocab: int, block: int, batch: int = 16, dtype: str = "float32",
    on_progress: OnCount | None = None,
) -> Score:  # fmt: skip
    """Score masked tokens in consecutive blocks of `block` tokens; the mask is the same at every call. An incomplete
    last block is skipped. vocab: size of the text's vocabulary."""
    device = next(model.parameters()).device
    block = min(block, len(ids))
    rows = ids[: len(ids) // block * block].reshape(-1, block)
    total, right, tokens = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    with _not_training(model):
        for at in range(0, len(rows), batch):
            some = rows[at : at + batch]
            part = mask_tokens(some, share, vocab=vocab, mask=model.mask, seeds=[(at + n,) for n in range(len(some))])
            x, places, y = (torch.from_numpy(a).to(device) for a in (part.x, part.at, part.y))
            with autocast(dtype, device):
                logits = model(x, at=places).logits
            total += _nll(logits, y).sum()
            right += int((logits.argmax(-1) == y).sum())
            tokens += y.numel()
            if on_progress is not None:
                on_progress(min(at + batch, len(rows)) * block, len(ids))
    return Score(float(total), tokens, tokens, right / tokens)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, T] float64, from logits [B, T, V]."""
    return F.cross_entropy(logits.double().transpose(1, 2), targets, reduction="none")


@contextlib.contextmanager
def _not_training(model: TransformerStack) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
