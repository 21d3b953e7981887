"""What `bench context` asks of a model, and the two kinds of models that it knows: ours and Hugging Face's.

A model of another library needs these seven things, and nothing else (docs/context.md).
Shapes: T tokens of a text, n = T − start targets.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 256
"""targets whose logits are computed at a time"""
NEW = 8
"""tokens decoded for each measured time"""


class Predicted(NamedTuple):
    nats: Tensor
    """[n] loss of each target given all tokens before it"""
    right: Tensor
    """[n] bool: whether the target is the likeliest token"""


class Cost(NamedTuple):
    """Of one more token of one text, with `context` tokens before it."""

    kv_bytes: int
    """that the KV cache, with all states and codes, holds"""
    flops: float | None
    """operations of its matrix products; None: not counted"""
    seconds: float
    """measured, the median"""


class ContextModel(Protocol):
    longest: int
    """tokens that it was made for; 0: any number"""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """{"input_ids": the tokens of a text}, as tokenizers of transformers answer."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def predict(self, ids: list[int], start: int) -> Predicted:
        """Of the tokens from `start` (at least 1) on."""
        ...

    def cost(self, context: int, rounds: int) -> Cost: ...


class OurModel:
    """A language model of this project: a run, a checkpoint or a model's folder."""

    def __init__(self, path: str) -> None:
        from spanformer.data import from_json
        from spanformer.model.lm import LM
        from spanformer.model.load import load_any, load_meta

        saved = load_meta(path).get("vocab")
        if not isinstance(saved, dict):
            raise ValueError(f"{path} has no vocabulary; bench context expects a model that can encode a text")
        lm, vocab = load_any(path), from_json(saved)
        if not isinstance(lm, LM) or vocab.kind == "pixel":
            what = "images" if vocab.kind == "pixel" else f"a model of kind {lm.config.kind!r}"
            raise ValueError(f"{path} holds {what}; bench context expects a language model of text")
        self.lm, self.vocab = lm.requires_grad_(False), vocab
        position = lm.config.position
        self.longest = position.length if position.kind.startswith("learned") else 0

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": self.vocab.encode(text).tolist()}

    def decode(self, ids: list[int]) -> str:
        return self.vocab.decode(ids)

    @torch.no_grad()
    def predict(self, ids: list[int], start: int) -> Predicted:
        x, state, found = torch.tensor([ids]), None, []
        for at in range(0, len(ids) - 1, CHUNK):
            part = self.lm(x[:, at : min(at + CHUNK, len(ids) - 1)], state)
            state = part.state
            found.append(scored(part.logits[0], x[0, at + 1 : at + 1 + part.logits.shape[1]]))
        return Predicted(*(torch.cat(each)[start - 1 :] for each in zip(*found, strict=True)))

    @torch.no_grad()
    def cost(self, context: int, rounds: int) -> Cost:
        from spanformer.cost.depth import token_cost
        from spanformer.train.run_events import model_shape

        ids, cache = random_ids(self.lm.config.vocab, read_first(context, rounds)), self.lm.cache(1)
        for part in ids.split(CHUNK, 1):
            self.lm.decode(part, cache, logits="none")
        token = ids[:, -1:]
        seconds = decoding_time(lambda: self.lm.decode(token, cache, logits="last"), rounds)
        shape = model_shape(self.lm, CHUNK, 1)
        return Cost(cache.bytes(), token_cost(shape, self.lm.distances(), context, shape.layers).total, seconds)


class Named(NamedTuple):
    """A model on the command line: PATH, PATH@0.33 (uniform windows that keep this share) or PATH@preset:NAME."""

    path: str
    share: float
    preset: str


def named_model(name: str) -> Named:
    found = re.fullmatch(r"(.+)@(?:(0?\.\d+)|(preset:[^@]+))", name)
    return Named(found[1], float(found[2] or 0), found[3] or "") if found else Named(name, 0.0, "")


class HuggingFaceModel:
    """A causal model in Hugging Face's format, whole or with what `fit-spans` left in its folder; or with uniform
    windows that keep a share of the KV cache of `context` tokens, or with the spans of a preset."""

    def __init__(
        self, name: str, dtype: torch.dtype, share: float, context: int, sink_tokens: int, preset: str = ""
    ) -> None:
        from spanformer.hf.attach import attach
        from spanformer.hf.baselines import uniform
        from spanformer.hf.fit import budget_of, check_layers, set_windows
        from spanformer.hf.retrieval_heads import retrieve
        from spanformer.hf.saved import fitted_retrieval, load_fitted
        from spanformer.hf.span_file import load_spans
        from spanformer.hf.spans import head_spans
        from spanformer.hf.text import check_logits

        self.model, self.tokenizer, fitted = load_fitted(name, dtype)
        self.model.requires_grad_(False).eval()
        self.retrieves = bool(found := fitted_retrieval(name) if fitted else {})
        if fitted and (share or preset):
            asked = preset or f"windows of @{share:g}"
            raise ValueError(f"{name} has spans of its own; expected a model without for {asked}")
        if preset:
            load_spans(self.model, preset)
        if share:
            attach(self.model, max_span=context, sink_tokens=sink_tokens)
            layers = list(head_spans(self.model).values())
            check_layers(layers)
            set_windows(
                self.model, uniform(len(layers), layers[0].groups, budget_of(layers, share, context, sink_tokens))
            )
        self.spans = bool(fitted or share or preset)
        if self.retrieves:
            retrieve(self.model, **found)
        self.longest = getattr(self.model.config, "max_position_embeddings", None) or 0
        check_logits(self.model)

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def predict(self, ids: list[int], start: int) -> Predicted:
        from spanformer.hf.text import chunks, hidden_states, logits_of

        x = torch.tensor([ids])
        states, targets = hidden_states(self.model, x, start)[0], x[0, start:]
        found = [scored(logits_of(self.model, states[part]), targets[part]) for part in chunks(len(targets), CHUNK)]
        return Predicted(*(torch.cat(each) for each in zip(*found, strict=True)))

    @torch.no_grad()
    def cost(self, context: int, rounds: int) -> Cost:
        from transformers import DynamicCache

        from spanformer.bench.hf import held_bytes
        from spanformer.hf import SpanCache
        from spanformer.hf.retrieval_cache import RetrievalCache

        ids = random_ids(self.model.config.vocab_size, read_first(context, rounds))
        kind = RetrievalCache if self.retrieves else SpanCache
        cache: Any = DynamicCache(config=self.model.config)
        if self.spans:
            cache = kind(self.model, context=max(context, ids.shape[1] + NEW * (rounds + 1)))
        for part in ids.split(CHUNK, 1):
            self.model(input_ids=part, past_key_values=cache, logits_to_keep=1)
        token = ids[:, -1:]
        seconds = decoding_time(lambda: self.model(input_ids=token, past_key_values=cache), rounds)
        return Cost(held_bytes(cache), self._flops(context), seconds)

    def _flops(self, context: int) -> float | None:
        """Of matrix products and attention; None for retrieving heads, whose searches are not counted."""
        from spanformer.cost.attention import FORWARD
        from spanformer.hf.spans import head_spans

        if self.retrieves:
            return None
        c, base = self.model.config, self.model.base_model
        embedding = {id(p) for p in self.model.get_input_embeddings().parameters()}
        weights = sum(p.numel() for p in base.parameters() if p.ndim == 2 and id(p) not in embedding)
        heads, size = c.num_attention_heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        seen = c.num_hidden_layers * heads * (context + 1)
        if self.spans:
            layers = head_spans(self.model).values()
            kept = ((s, n) for s in layers for n in s.keeps(context + 1))
            seen = sum(min(n + s.sink_tokens, context + 1) * heads // s.groups for s, n in kept)
        return 2.0 * weights + 2.0 * c.hidden_size * c.vocab_size + FORWARD * size * seen


def scored(logits: Tensor, targets: Tensor) -> Predicted:
    nats = functional.cross_entropy(logits.float(), targets, reduction="none")
    return Predicted(nats, logits.argmax(-1) == targets)


def random_ids(vocab: int, count: int) -> Tensor:
    """[1, count]"""
    return torch.randint(0, vocab, (1, count), generator=torch.Generator().manual_seed(0))


def read_first(context: int, rounds: int) -> int:
    """Tokens to read before those that are decoded, so that there are `context` at the end."""
    return max(1, context - NEW * (rounds + 1))


def decoding_time(step: Callable[[], object], rounds: int) -> float:
    """Median seconds of a token: the first tokens warm up."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for _ in range(NEW):
            step()
        found.append((time.perf_counter() - began) / NEW)
    return statistics.median(found[1:])
