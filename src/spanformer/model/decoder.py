"""A model that decodes token by token: a language model, or the decoder of an encoder–decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from spanformer.memory import Cache, LayerMemory
from spanformer.model.decoding import read
from spanformer.model.decoding_rules import DecodingRules
from spanformer.model.skipped_layers import SkippedLayers
from spanformer.model.stack import TransformerStack


class Decoder(TransformerStack):
    _decoding_rules: DecodingRules | None = None
    _skipped: SkippedLayers | None = None

    def decode(
        self,
        x: Tensor,
        cache: Cache,
        *,
        lengths: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> Tensor | None:
        """Run the next tokens x [B, T] of each row of the KV cache, without gradients and dropout.

        lengths [B]: how many of a row's T tokens are real; the others are padding after them. Returns the logits of
        all tokens [B, T, V], or of each row's last real token [B, V] (undefined for a row without any), or
        None. They equal the logits of `lm(x)` over the whole text so far.
        """
        return read(self, x, cache, lengths, logits)

    def output_states(self, h: Tensor, x: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        """What the output layer reads, from the last block's output h [B, T, dim] for the tokens x [B, T]."""
        return self.norm(h)

    def skip_from(self, n: int, x: Tensor, memories: Sequence[LayerMemory]) -> bool:
        if self._skipped is None:
            self._skipped = SkippedLayers(self)
        return self._skipped.store(n, x, memories)

    @property
    def decoding_rules(self) -> DecodingRules:
        """The rules that `decode` uses."""
        if self._decoding_rules is None:
            self._decoding_rules = DecodingRules(self)
        return self._decoding_rules
