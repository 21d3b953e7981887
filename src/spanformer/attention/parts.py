"""Heads of several kinds in one layer: what all such mechanisms have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention


class Parts(Attention):
    """The base of mechanisms whose heads are those of its parts, in order."""

    def __init__(self, parts: Sequence[Attention]) -> None:
        super().__init__()
        if not parts:
            raise ValueError("parts is empty; expected at least one mechanism")
        for part in parts:
            if refused := part.supports(mixed=True):
                raise ValueError(refused[0])
        self.parts = nn.ModuleList(parts)
        self.heads = sum(part.heads for part in parts)
        self.sink_tokens = max(part.sink_tokens for part in parts)

    def each(self) -> list[Attention]:
        """The mechanism of each part."""
        return [part for part in self.parts if isinstance(part, Attention)]

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        every = (p.supports(position=position, cache=cache, mixed=mixed, persistent=persistent) for p in self.each())
        return [reason for reasons in every for reason in reasons]

    def map_queries(self, q: Tensor) -> Tensor:
        """Each part maps the queries of its heads."""
        pieces = q.split([part.heads for part in self.each()], 1)
        mapped = [part.map_queries(piece) for part, piece in zip(self.each(), pieces, strict=True)]
        return q if all(a is b for a, b in zip(mapped, pieces, strict=True)) else torch.cat(mapped, 1)

    def context_length(self) -> list[int]:
        return [n for part in self.each() for n in part.context_length()]

    def spans(self) -> list[float | None]:
        return [z for part in self.each() for z in part.spans()]

    def mean_context(self) -> list[int]:
        return [n for part in self.each() for n in part.mean_context()]

    def advice(self) -> str | None:
        found = [text for part in self.each() if (text := part.advice())]
        return "; ".join(found) or None

    def after_step(self) -> None:
        for part in self.each():
            part.after_step()
