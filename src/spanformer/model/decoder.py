"""A model that reads a text token by token: a language model, or the half of an encoder–decoder that writes."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from spanformer.memory import Cache
from spanformer.model.layered import Layered
from spanformer.model.reading import Reader, read


class Decoder(Layered):
    _reader: Reader | None = None

    def read(
        self,
        x: Tensor,
        cache: Cache,
        *,
        lengths: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> Tensor | None:
        """Read the next tokens x [B, T] of each row of the cache, without gradients and dropout.

        lengths [B]: how many of a row's T tokens are real; the others are padding behind them. Returns the logits of
        all tokens [B, T, V], or of each row's last real token [B, V] (of a row without any, they mean nothing), or
        None. They are those of `lm(x)` over the whole text so far.
        """
        return read(self, x, cache, lengths, logits)

    @property
    def reader(self) -> Reader:
        """The rules that `read` goes by."""
        if self._reader is None:
            self._reader = Reader(self)
        return self._reader
