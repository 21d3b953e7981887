"""What `bench ruler` asks of a model of Hugging Face: answers from a KV cache of few bytes, loss, and pass keys.

Rows differ in what the KV cache holds: everything, uniform windows, the spans of a fitted folder or of a preset, each
in 16, 8 or 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from spanformer.bench.context_models import HuggingFaceModel, named_model
from spanformer.bench.ruler_questions import Question, score

Bits = Literal[16, 8, 4]
POINTS = 8
"""parts of the scored half of a text, at whose ends the bytes of the KV cache are listed"""


class Answer(NamedTuple):
    score: float
    kv_bytes: int
    """that the KV cache holds of the prompt"""


class RulerModel:
    """name: as `named_model` takes it; context: tokens for which uniform windows keep their share."""

    def __init__(self, name: str, bits: Bits, dtype: torch.dtype, *, context: int, sink_tokens: int) -> None:
        from spanformer.hf.attach import attach

        self.path, share, preset = named_model(name)
        held = HuggingFaceModel(self.path, dtype, share, context, sink_tokens, preset)
        self.model, self.tokenizer, self.retrieves = held.model, held.tokenizer, held.retrieves
        if self.retrieves and bits != 16:
            raise ValueError(f"{name} has retrieval heads, whose KV cache has 16 bits here; leave out --kv-bits {bits}")
        self.full = not held.spans
        self.bits: Bits = bits
        if self.full and bits != 16:  # with spans that change nothing, for a SpanCache
            attach(self.model, sink_tokens=sink_tokens)
        self.spans = held.spans or bits != 16
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        self.ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}

    def check_lengths(self, questions: Iterable[Question], context: int) -> None:
        """Refuse texts that are longer than those for which the model was made."""
        longest, most = (
            max(context, *map(self._length, questions)),
            getattr(self.model.config, "max_position_embeddings", None),
        )
        if most and longest > most:
            raise ValueError(
                f"the longest text has {longest:,} tokens, and {self.path} was made for {most:,}; ask for shorter "
                "tasks, or a shorter --context"
            )

    def _length(self, question: Question) -> int:
        """Tokens of the prompt and the longest answer."""
        if question.match == "choice":
            return max(self._ids(question, output).shape[1] for output in question.outputs)
        return self._ids(question).shape[1] + question.new_tokens

    def _ids(self, question: Question, output: str = "") -> torch.Tensor:
        """[1, T]"""
        return self.tokenizer(question.prompt + output, return_tensors="pt", verbose=False)["input_ids"]

    def answer(self, question: Question) -> Answer:
        return self.choose(question) if question.match == "choice" else self.write(question)

    @torch.no_grad()
    def choose(self, question: Question) -> Answer:
        """The continuation with the largest log-likelihood for each character."""
        from spanformer.bench.hf import held_bytes

        cache, prompt, found = self._cache(), self._ids(question), list[float]()
        self.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        start = prompt.shape[1]
        for output in question.outputs:
            ids = self._ids(question, output)
            kept = ids.shape[1] - start
            if kept < 1:
                raise ValueError(f"{question.task}: {output!r} adds no token to its prompt; leave the question out")
            with self._rounded():
                logits = self.model(input_ids=ids, logits_to_keep=kept + 1).logits[0, :-1].float()
            likely = logits.log_softmax(-1).gather(1, ids[0, start:, None]).sum()
            found.append(float(likely) / len(output))
        best = max(range(len(found)), key=found.__getitem__)
        return Answer(float(best == question.right), held_bytes(cache))

    @torch.no_grad()
    def write(self, question: Question) -> Answer:
        """Generate greedily. An answer that holds all it should cannot lose its score, so it ends there."""
        from spanformer.bench.hf import held_bytes

        cache, found = self._cache(), list[int]()
        logits = self.model(input_ids=self._ids(question), past_key_values=cache, logits_to_keep=1).logits
        kv_bytes, reached = held_bytes(cache), 0.0
        while (token := int(logits[0, -1].argmax())) not in self.ends:
            found.append(token)
            reached = score(self.tokenizer.decode(found, skip_special_tokens=True), question)
            if reached == 1.0 or len(found) == question.new_tokens:
                break
            logits = self.model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
        return Answer(reached, kv_bytes)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        from spanformer.hf import SpanCache
        from spanformer.hf.retrieval_cache import RetrievalCache

        if not self.spans:
            return DynamicCache(config=self.model.config)
        if self.retrieves:
            return RetrievalCache(self.model)
        return SpanCache(self.model) if self.bits == 16 else SpanCache(self.model, bits=self.bits)

    def loss(self, texts: Any, tick: Callable[[], None]) -> dict[str, Any]:
        """Bits per byte on the counted targets of TextChunks, and the bytes of the KV cache from which these were
        predicted: their mean, and some by the number of tokens."""
        from spanformer.hf.text import chunk_bits

        with self._rounded():
            bits = chunk_bits(self.model, texts, lambda *_: tick())
        found: dict[str, Any] = {"bits_per_byte": sum(bits) / float(texts.bytes.sum())}
        if not self.retrieves:
            held = {n: self.kv_bytes(n) for n in range(texts.start, texts.context + 1)}
            step = max(1, texts.targets // POINTS)
            found["kv_bytes"] = sum(held[n] for n in range(texts.start, texts.context)) / texts.targets
            found["at"] = {str(n): held[n] for n in range(texts.start, texts.context + 1, step)}
        return found

    def kv_bytes(self, tokens: int) -> int:
        """Size of the KV cache that holds a text of `tokens` tokens."""
        from spanformer.hf.spans import cache_bytes

        if self.spans:
            return cache_bytes(self.model, tokens, bits=0 if self.bits == 16 else self.bits)[0]
        numbers = sum(min(tokens, window or tokens) * size for window, size in self._sizes)
        return numbers * self.model.dtype.itemsize

    @cached_property
    def _sizes(self) -> list[tuple[int | None, int]]:
        """(own window, numbers of a token's keys and values) of each layer"""
        from spanformer.hf.attach import probe

        found = probe(self.model).values()
        return [(layer.window, layer.kv_heads * (layer.key_size + layer.value_size)) for layer in found]

    def needles(
        self, contexts: tuple[int, ...], depths: int, tasks: int, seed: int, tick: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Pass keys by length and depth (`spanformer probe` has the same)."""
        from spanformer.hf.probe import as_rows, probe

        with self._rounded():
            found = probe(
                self.model, self.tokenizer, contexts=contexts, depths=depths, tasks=tasks, seed=seed,
                on_progress=lambda *_: tick(),
            )  # fmt: skip
        return as_rows(found)

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """In forward passes over whole texts, keys and values as a KV cache of these bits gives them."""
        from spanformer.hf.rounded import rounded_kv

        if self.bits == 16:
            yield
        else:
            with rounded_kv(self.bits):
                yield
