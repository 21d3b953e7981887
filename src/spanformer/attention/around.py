"""A mechanism around another one, whose heads see what the inner one says."""

from __future__ import annotations

from torch import Tensor

from spanformer.attention.base import Attention, View
from spanformer.ops import Rule


class Around(Attention):
    def __init__(self, inner: Attention) -> None:
        super().__init__()
        if inner.alone:
            raise ValueError(
                f"{type(inner).__name__} mixes values in its own way; {type(self).__name__} needs one that only says "
                "what its heads see"
            )
        if getattr(inner, "original", False):
            raise ValueError(f"the paper's code has no {type(self).__name__}; expected original=False")
        self.inner, self.heads = inner, inner.heads
        self.kept, self.placed, self.reads_keys = inner.kept, inner.placed, inner.reads_keys
        self.causal = getattr(inner, "causal", True)
        self.turnable = self.turnable and inner.turnable

    def rule(self, view: View) -> Rule:
        return self.inner.rule(view)

    def map_queries(self, q: Tensor) -> Tensor:
        return self.inner.map_queries(q)

    def lookback(self) -> list[int]:
        return self.inner.lookback()

    def learned(self) -> list[float | None]:
        return self.inner.learned()

    def looked(self) -> list[int]:
        return self.inner.looked()

    def after_step(self) -> None:
        self.inner.after_step()
