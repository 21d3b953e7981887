"""A Hugging Face model in EleutherAI's evaluation harness, which generates with a per-head KV cache:
lm_eval.simple_evaluate(model=SpanHFLM(model, tokenizer), …).

Log-likelihoods are the harness's own: forward passes over whole texts, without a KV cache.

Shapes: B texts of a batch, T tokens of the longest.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

try:
    from lm_eval.api.model import CacheHook  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f'spanformer.hf.lm_eval_hf works on lm-eval with its extra hf ({error}): pip install "spanformer[eval]"'
    ) from error

from spanformer.core.progress import OnProgress, silent
from spanformer.hf.attach import attach
from spanformer.hf.cache import SpanCache
from spanformer.hf.retrieval_cache import RetrievalCache
from spanformer.hf.retrieval_heads import retriever_of
from spanformer.hf.spans import NAME, head_spans
from spanformer.ops.decode.codes import Bits, check_bits


class SpanHFLM(HFLM):
    """model: with or without spans; with spans, generation keeps for each KV head only what it sees.

    bits: 8 or 4 stores keys and values in as many bits while generating (a model without spans gets full ones, which
    change nothing else); 0: in the model's dtype. others: arguments of `HFLM`, such as batch_size and max_length.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, bits: Bits = 0, on_progress: OnProgress = silent,
        **others: Any,
    ) -> None:  # fmt: skip
        check_bits(bits)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token, with which the harness begins texts without context and "
                "ends generated ones; set its eos_token"
            )
        if bits and not _has_spans(model):
            attach(model)
        logging.getLogger(HFLM.__module__).addFilter(_of_names)
        super().__init__(pretrained=model, tokenizer=tokenizer, **others)
        self.cache_class = _cache_class(model)
        self.bits: Bits = bits
        self.on_progress, self._work, self._done, self._total = on_progress, "", 0, 0
        self.set_cache_hook(self.cache_hook)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        super().set_cache_hook(_Counting(cache_hook, self._count))

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._begin("log-likelihoods", len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Some texts at a time, because the harness counts none before the last."""
        self._begin("log-likelihoods of texts", len(requests))
        size = self.batch_size if isinstance(self.batch_size, int) else max(1, len(requests))
        found: list[float] = []
        for n in range(0, len(requests), size):
            found += super().loglikelihood_rolling(requests[n : n + size], disable_tqdm=True)
        return found

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        self._begin("generating", len(requests))
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **others: Any) -> list:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, **others)

    @torch.no_grad()
    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """context [B, T], padded at the left → the same with the generated tokens."""
        if self.cache_class is not None:
            cache = self.cache_class(self.model, context=max_length, bits=self.bits)
            options["past_key_values"] = cache
        return super()._model_generate(context, max_length, stop, **options)

    def _begin(self, work: str, total: int) -> None:
        self._work, self._done, self._total = work, 0, total
        self.on_progress(work, 0, total)

    def _count(self) -> None:
        self._done += 1
        self.on_progress(self._work, self._done, self._total)


class _Counting:
    """The harness's hook, which HFLM calls for each request that is done; it also counts them."""

    def __init__(self, hook: CacheHook, count: Any) -> None:
        self.hook, self.count = hook, count

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.hook.add_partial(attr, req, res)
        self.count()


def _has_spans(model: PreTrainedModel) -> bool:
    return any(NAME in module._modules for module in model.modules())


def _cache_class(model: PreTrainedModel) -> type[SpanCache] | None:
    if not _has_spans(model):
        return None
    retrieves = any(retriever_of(spans) is not None for spans in head_spans(model).values())
    return RetrievalCache if retrieves else SpanCache


def _of_names(record: logging.LogRecord) -> bool:
    """HFLM warns that a model that is given, instead of its name, may have been loaded with other options."""
    said = record.getMessage()
    return "already-initialized model" not in said and "`pretrained` model kwarg is not of type" not in said
