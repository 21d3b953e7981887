"""Padding and KV caches: rows of a cache have real tokens only, while transformers counts padding as tokens too.

Shapes: B batch, T new tokens.
"""

from __future__ import annotations

from torch import Tensor


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """[B, heads, T, D] with its tokens in the order [B, T]."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def pack_real(real: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """For real [B, T], True for real tokens: (order [B, T] with real tokens first, its inverse, lengths [B] on
    the CPU); None if all are real."""
    if bool(real.all()):
        return None
    order = real.int().argsort(dim=1, descending=True, stable=True)
    return order, order.argsort(dim=1), real.sum(1).cpu()


class Read:
    """Which of the tokens read so far were real, so that removing the last tokens removes the right ones."""

    def __init__(self) -> None:
        self.length = 0
        """as transformers counts, padding included"""
        self._parts: list[tuple[int, Tensor | None]] = []
        """(T, real [B, T]) in the order they were read; None: all were, and such neighbours are one"""

    def add(self, tokens: int, real: Tensor | None) -> None:
        self.length += tokens
        if real is None and self._parts and self._parts[-1][1] is None:
            tokens += self._parts.pop()[0]
        self._parts.append((tokens, real))

    def last(self, tokens: int) -> int | Tensor:
        """How many of the last this many were real, [B] on the CPU where rows may differ."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"{self.length} tokens were read; {tokens} cannot be removed")
        found: int | Tensor = 0
        for size, real in reversed(self._parts):
            count = min(size, tokens)
            found = found + (count if real is None else real[:, size - count :].sum(1).cpu())
            tokens -= count
        return found

    def drop(self, tokens: int) -> None:
        """Remove the last `tokens`."""
        self.length -= tokens
        while tokens:
            size, real = self._parts.pop()
            if size > tokens:
                self._parts.append((size - tokens, None if real is None else real[:, : size - tokens]))
            tokens -= min(size, tokens)

    def rows(self, index: Tensor) -> None:
        """Row b becomes a copy of row index[b]."""
        self._parts = [(n, None if real is None else real[index.to(real.device)]) for n, real in self._parts]
