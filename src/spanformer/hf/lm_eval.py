"""Our language model in EleutherAI's evaluation harness: lm_eval.simple_evaluate(model=HarnessLM(lm, vocab, …)).

For a Hugging Face model see lm_eval_hf.py.

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

from spanformer.core.progress import OnProgress, silent
from spanformer.model.lm import LM
from spanformer.ops.decode.codes import Bits, check_bits


class Tokenizer(Protocol):
    """Anything that encodes text as ids, such as our `Vocab`."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class HarnessLM(TemplateLM):
    """An `LM` with its vocabulary. start: the id before the first token of a text without context (for bytes, 10: the
    end of a line). Texts of any length are scored completely: heads see as far as their spans. bits: 8 or 4 stores the
    KV cache of generation in as many bits; 0: in the model's dtype."""

    def __init__(
        self, lm: LM, vocab: Tokenizer, *, start: int, longest: int = 256, bits: Bits = 0,
        on_progress: OnProgress = silent,
    ) -> None:  # fmt: skip
        super().__init__()
        check_bits(bits)
        if not 0 <= start < lm.config.vocab:
            raise ValueError(f"start is {start}; expected an id of the vocabulary, 0 … {lm.config.vocab - 1}")
        self.lm, self.vocab, self.start = lm.eval(), vocab, start
        self.bits: Bits = bits
        self.on_progress = on_progress
        self.longest = longest
        """tokens to generate if a task has no max_gen_toks"""
        self._device = next(lm.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_others: Any) -> list[int]:
        return [int(i) for i in self.vocab.encode(string)]

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # on_progress counts them

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_others: Any) -> list:
        found = []
        for n, (_texts, context, continuation) in enumerate(requests):
            self.on_progress("log-likelihoods", n, len(requests))
            if not continuation:  # the text was the start alone
                found.append((0.0, True))
                continue
            log_p = self._log_p([*context, *continuation][:-1], len(context) - 1)
            want = torch.tensor(continuation, device=log_p.device)
            each = log_p.gather(1, want[:, None])
            found.append((float(each.sum()), bool((log_p.argmax(1) == want).all())))
        self.on_progress("log-likelihoods", len(requests), len(requests))
        return found

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        whole = [((("", text)), [self.start], self.tok_encode(text)) for (text,) in (r.args for r in requests)]
        return [score for score, _ in self._loglikelihood_tokens(whole)]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        texts = []
        for n, request in enumerate(requests):
            self.on_progress("generating", n, len(requests))
            context, options = request.args
            texts.append(self._generate(context, dict(options)))
        self.on_progress("generating", len(requests), len(requests))
        return texts

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template:
            raise ValueError("a chat template is asked for, and a model of spanformer has none; leave the option out")
        return ""

    @torch.no_grad()
    def _log_p(self, ids: list[int], first: int) -> Tensor:
        """[T − first, V] of the token after each id from the position `first` on."""
        logits = self.lm(torch.tensor([ids], device=self._device)).logits
        return logits[0, first:].double().log_softmax(-1)

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.pop("until", [])
        longest = int(options.pop("max_gen_toks", options.pop("max_new_tokens", self.longest)))
        temperature = float(options.pop("temperature", 0.0) or 0.0)
        sampled = options.pop("do_sample", temperature > 0)
        without = {"top_p", "top_k"} | ({"num_beams"} if options.get("num_beams") == 1 else set())
        options = {name: value for name, value in options.items() if name not in without}
        if sampled or options:
            raise ValueError(
                f"this task asks for {options or 'sampling'}; expected greedy generation, the only one supported here"
            )
        stops = [until] if isinstance(until, str) else list(until)
        cache = self.lm.cache(1, bits=self.bits)
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
