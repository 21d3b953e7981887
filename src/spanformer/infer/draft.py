"""Drafts by early exit: the first layers guess the next tokens, and all layers check them in one step.

LayerSkip (Elhoushi et al., 2024), https://arxiv.org/abs/2404.16710; checking guesses without changing the output:
Leviathan et al., 2022, https://arxiv.org/abs/2211.17192.

The text is that of the full model. It is faster only if drafts are often right and leave early: k drafts of E of L
layers and one check of k + 1 tokens replace as many steps as drafts were right, plus one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spanformer.memory.cache import Cache
from spanformer.model.lm import LM


@dataclass(frozen=True)
class Draft:
    layers: int
    """layers of a draft"""
    tokens: int
    """drafts per check"""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.tokens < 1:
            raise ValueError(
                f"a draft of {self.layers} layers and {self.tokens} tokens was asked for; expected 1 or more each"
            )


class EarlyExit:
    """Guesses the continuation of the text in a KV cache, for one row; see `Chooser`."""

    def __init__(self, model: LM, cache: Cache, draft: Draft, vocab: int) -> None:
        """vocab: guess among this many tokens."""
        self.model, self.cache, self.draft, self.vocab = model, cache, draft, vocab
        self.exits, self.last = model.exits(), -1
        if draft.layers >= self.exits.layers:
            raise ValueError(f"a draft leaves after layer {draft.layers}; expected less than {self.exits.layers}, all")

    def add(self, tokens: Sequence[int]) -> None:
        """The last of these is the next token that the model reads."""
        self.last = tokens[-1]

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens; the KV cache is as before."""
        found: list[int] = []
        self.exits.fixed = self.draft.layers
        try:
            while len(found) < min(most, self.draft.tokens):
                x = torch.tensor([[found[-1] if found else self.last]], device=next(self.model.parameters()).device)
                logits = self.model.decode(x, self.cache)
                assert logits is not None
                found.append(int(logits[0, -1, : self.vocab].argmax()))
        finally:
            self.exits.fixed = None
            if found:
                self.cache.crop(self.cache.seen - len(found))
        return found
