"""A model as a datastore sees it: text to tokens, tokens to keys and predictions. `LmKeys` is our language model;
`spanformer.hf.datastore` has the same for Hugging Face models.

The key of a context is the input of the last feed-forward, after its norm: in the kNN-LM paper it gave a perplexity of
16.06, the layer's output 17.07.

Shapes: n tokens, D numbers of a key, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from spanformer.memory.digest import digest
from spanformer.model.lm import LM
from spanformer.retrieve.header import Header, Keys, Maker
from spanformer.retrieve.mixture import Retrieval, mixed_log_probs, mixed_nll
from spanformer.retrieve.store import Store
from spanformer.retrieve.writer import check_maker

KEY = "input of the last feed-forward, normed"
SEGMENT = 512


class Piece(NamedTuple):
    """Some tokens of a window that the model has read."""

    keys: Tensor
    """[n, D] float32"""
    logits: Tensor | None
    """[n, V] of the next token, if wanted"""


class KeyModel(Protocol):
    dim: int
    vocab: int
    maker: Maker
    context: int
    """tokens of a window by default"""

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: list[int]) -> str: ...
    def read(self, ids: Tensor, *, logits: bool) -> Iterator[Piece]:
        """Read one window of ids [n], from an empty context, in pieces."""
        ...


def header_of(model: KeyModel, keys: Keys, pca: int, context: int) -> Header:
    return Header(model.dim, model.vocab, model.maker, keys, pca, context or model.context)


def check_made(store: Store, maker: Maker, dim: int, vocab: int) -> None:
    """Refuse a datastore that another model has made, also one of the same width."""
    check_maker(store.folder, store.header, maker)
    if store.header.dim != dim or store.header.vocab != vocab:
        raise ValueError(
            f"{store.folder} has keys of {store.header.dim} numbers and a vocabulary of {store.header.vocab:,}; "
            f"expected {dim} and {vocab:,}, as the model has"
        )


class LmKeys:
    """A spanformer language model; vocab: its vocabulary (`spanformer.data`), for text."""

    context = 16 * SEGMENT

    def __init__(self, lm: LM, vocab: Any = None, name: str = "") -> None:
        self.lm, self.text = lm.eval(), vocab
        self.feedforward = last_feedforward(lm)
        self.dim, self.vocab = lm.config.dim, lm.config.vocab
        spelt = "" if vocab is None else json.dumps(vocab.to_json(), sort_keys=True)
        dtype = str(next(lm.parameters()).dtype).removeprefix("torch.")
        self.maker = Maker(digest(lm), KEY, dtype, hashlib.sha256(spelt.encode()).hexdigest(), name)

    def encode(self, text: str) -> np.ndarray:
        return self.text.encode(text).astype(np.int64)

    def decode(self, ids: list[int]) -> str:
        return self.text.decode(ids)

    @torch.inference_mode()
    def read(self, ids: Tensor, *, logits: bool) -> Iterator[Piece]:
        state = None
        with watched(self.feedforward) as keys:
            for at in range(0, len(ids), SEGMENT):
                x = ids[None, at : at + SEGMENT]
                found = self.lm(x, state, targets=None if logits else x)
                state = found.state
                yield Piece(taken(keys)[0].float(), None if found.logits is None else found.logits[0])


def last_feedforward(lm: LM) -> nn.Module:
    found = lm.layers()[-1].feedforward
    if found is None:
        raise ValueError("the last layer has no feed-forward, whose input is the key; a datastore needs one")
    return found


@contextlib.contextmanager
def watched(module: nn.Module) -> Iterator[list[Tensor]]:
    """A list of the inputs that the module gets; a layer may give them in parts."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def taken(seen: list[Tensor]) -> Tensor:
    """[B, T, D]: the inputs of one forward pass, out of the list."""
    whole = seen[0] if len(seen) == 1 else torch.cat(seen, -2)
    seen.clear()
    return whole


@contextlib.contextmanager
def retrieving(lm: LM, retrieval: Retrieval, maker: Maker) -> Iterator[LM]:
    """Inside this block every prediction of the model is mixed with the datastore's: in `lm(x)`, in scoring and in
    generation. maker: of its `LmKeys`. The model is changed in place and restored at the end; it must not be trained
    inside.

    The key has to reach the output layer, and decoding picks single tokens before it. So the last block's output
    carries the key in a second half, until the output layer takes it.
    """
    check_made(retrieval.store, maker, lm.config.dim, lm.config.vocab)
    if lm.config.stack == "reversible":
        raise ValueError("stack is 'reversible', which adds two streams after the key; a datastore serves plain stacks")
    if lm.config.neighbours:
        raise ValueError(
            f"the model mixes in {lm.config.neighbours} neighbours itself (model.neighbours); expected a model without "
            "them for a datastore"
        )
    dim, head, beside = lm.config.dim, lm.head, []
    logits, nll = head.logits, head.nll

    def carry(_block: nn.Module, _inputs: object, out: Any) -> tuple:
        return torch.cat([out[0], taken(keys)], -1), *out[1:]

    def join(_norm: nn.Module, _inputs: object, out: Any) -> Tensor:
        return torch.cat([out, beside.pop()], -1)

    def split(_norm: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        beside.append(inputs[0][..., dim:])
        return (inputs[0][..., :dim].contiguous(),)

    def mixed_logits(h: Tensor) -> Tensor:
        keys, found = h[..., dim:].flatten(0, -2), logits(h[..., :dim].contiguous())
        if retrieval.idle:
            return found
        mixed = mixed_log_probs(retrieval, keys.float(), found.flatten(0, -2))
        return mixed.view(found.shape).to(torch.promote_types(found.dtype, torch.float32))

    def mixed_losses(h: Tensor, targets: Tensor) -> Tensor:
        keys, plain = h[..., dim:].flatten(0, -2), h[..., :dim].contiguous()
        found = nll(plain, targets)
        if retrieval.idle:
            return found
        all_logits = None if retrieval.settings.gate is None else logits(plain).flatten(0, -2)
        mixed = mixed_nll(retrieval, keys.float(), found.flatten(), targets.flatten(), all_logits)
        return mixed.view(found.shape).to(found.dtype)

    with watched(last_feedforward(lm)) as keys:
        handles = [
            lm.layers()[-1].register_forward_hook(carry),
            lm.norm.register_forward_pre_hook(split),
            lm.norm.register_forward_hook(join),
        ]
        head.logits, head.nll = mixed_logits, mixed_losses  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield lm
        finally:
            del head.logits, head.nll
            for handle in handles:
                handle.remove()
