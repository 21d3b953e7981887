"""Datastores for Hugging Face causal language models: their keys, and their predictions mixed with a datastore's.

    model, tokenizer = load_model("folder")
    keys = HfKeys(model, tokenizer)
    with retrieving(keys, Retrieval(store, settings)):
        model.generate(...)        # also model(...).logits

The key is the input of the last layer's feed-forward (`mlp`), found by a forward hook.

Shapes: n tokens, D numbers of a key, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.hf.text import check_logits, logits_of
from spanformer.memory.digest import digest_tensors
from spanformer.retrieve.header import Maker
from spanformer.retrieve.mixture import Retrieval, mixed_log_probs
from spanformer.retrieve.model import KEY, Piece, check_made, taken, watched

NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "block_sparse_moe")
LOGITS = 128  # tokens whose logits are in memory at a time


class HfKeys:
    """A causal language model and its tokenizer, as `spanformer.hf.text.load_model` gives them."""

    context = 1024

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str = "") -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.feedforward = last_feedforward(model)
        check_logits(model)
        head = model.get_output_embeddings()
        assert head is not None
        self.head: nn.Module = head
        self.dim, self.vocab = int(model.config.hidden_size), int(model.config.vocab_size)
        words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
        described = model.config.to_diff_dict()
        for each in ("transformers_version", "_name_or_path"):  # say nothing of what it computes
            described.pop(each, None)
        config = json.dumps(described, sort_keys=True, default=str)
        self.maker = Maker(
            digest_tensors(f"{type(model).__name__} {config}\n", model.state_dict()), KEY,
            str(model.dtype).removeprefix("torch."), hashlib.sha256(words.encode()).hexdigest(), name,
        )  # fmt: skip

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @torch.inference_mode()
    def read(self, ids: Tensor, *, logits: bool) -> Iterator[Piece]:
        with watched(self.feedforward) as seen:
            states = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            keys = taken(seen).view(len(ids), -1).float()
        if not logits:
            yield Piece(keys, None)
            return
        for at in range(0, len(ids), LOGITS):
            yield Piece(keys[at : at + LOGITS], logits_of(self.model, states[at : at + LOGITS]))


def last_feedforward(model: PreTrainedModel) -> nn.Module:
    """The feed-forward of the last layer: of the longest list of modules that all have one by a usual name."""
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    for layers in sorted(lists, key=len, reverse=True):
        for name in NAMES:
            if isinstance(found := getattr(layers[-1], name, None), nn.Module):
                return found
    raise ValueError(
        f"{type(model).__name__} has no layers with a feed-forward named {', '.join(NAMES)}; a datastore needs "
        "its input"
    )


@contextlib.contextmanager
def retrieving(keys: HfKeys, retrieval: Retrieval) -> Iterator[PreTrainedModel]:
    """Inside this block the model's logits are log-probabilities mixed with the datastore's, in `generate` as well. Of
    `logits_to_keep`, whole numbers are served: the last tokens."""
    check_made(retrieval.store, keys.maker, keys.dim, keys.vocab)
    with watched(keys.feedforward) as seen:

        def mix(_head: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
            found = taken(seen)
            if retrieval.idle:
                return logits
            (h,) = inputs
            found = found.view(h.shape[0], -1, keys.dim)[:, found.shape[-2] - h.shape[-2] :]
            mixed = mixed_log_probs(retrieval, found.flatten(0, -2).float(), logits.flatten(0, -2))
            return mixed.view(logits.shape).to(torch.promote_types(logits.dtype, torch.float32))

        handle = keys.head.register_forward_hook(mix)
        try:
            yield keys.model
        finally:
            handle.remove()
