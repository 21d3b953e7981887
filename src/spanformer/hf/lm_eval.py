"""Our language model in EleutherAI's evaluation harness: lm_eval.simple_evaluate(model=HarnessLM(lm, vocab, …)).

A Hugging Face model with spans attached does not need this module: the harness takes it as
HFLM(pretrained=model, tokenizer=…).

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        'spanformer.hf.lm_eval works on lm-eval, which is missing: pip install "spanformer[eval]"'
    ) from error

from spanformer.model.lm import LM


class Tokenizer(Protocol):
    """Anything that encodes text as ids, such as our `Vocab`."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class HarnessLM(TemplateLM):
    """An `LM` with its vocabulary. start: the id before the first token of a text without context (for bytes, 10: the
    end of a line). Texts of any length are scored completely: heads see as far as their spans."""

    def __init__(self, lm: LM, vocab: Tokenizer, *, start: int, longest: int = 256) -> None:
        super().__init__()
        if not 0 <= start < lm.config.vocab:
            raise ValueError(f"start is {start}; expected an id of the vocabulary, 0 … {lm.config.vocab - 1}")
        self.lm, self.vocab, self.start = lm.eval(), vocab, start
        self.longest = longest
        """tokens to generate if a task has no max_gen_toks"""
        self._device = next(lm.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_others: Any) -> list[int]:
        return [int(i) for i in self.vocab.encode(string)]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_others: Any) -> list:
        found = []
        for _texts, context, continuation in requests:
            log_p = self._log_p([*context, *continuation][:-1])[len(context) - 1 :]
            want = torch.tensor(continuation, device=log_p.device)
            each = log_p.gather(1, want[:, None])
            found.append((float(each.sum()), bool((log_p.argmax(1) == want).all())))
        return found

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        whole = [((("", text)), [self.start], self.tok_encode(text)) for (text,) in (r.args for r in requests)]
        return [score for score, _ in self._loglikelihood_tokens(whole)]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        return [self._generate(context, dict(options)) for context, options in (r.args for r in requests)]

    @torch.no_grad()
    def _log_p(self, ids: list[int]) -> Tensor:
        """[T, V] of the token after each id."""
        logits = self.lm(torch.tensor([ids], device=self._device)).logits
        return logits[0].double().log_softmax(-1)

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until, longest = options.pop("until", []), int(options.pop("max_gen_toks", self.longest))
        sampled = options.pop("do_sample", False) or float(options.pop("temperature", 0.0) or 0.0) > 0
        if sampled or options:
            raise ValueError(
                f"this task asks for {options or 'sampling'}; expected greedy generation, the only one supported here"
            )
        stops = [until] if isinstance(until, str) else list(until)
        cache = self.lm.cache(1)
        next_ids, made = [self.start, *self.tok_encode(context)], []
        for _ in range(longest):
            logits = self.lm.decode(torch.tensor([next_ids], device=self._device), cache, logits="last")
            assert logits is not None
            next_ids = [int(logits[0].argmax())]
            made += next_ids
            text = self.vocab.decode(made)
            ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
            if ends:
                return text[: min(ends)]
        return self.vocab.decode(made)
