"""The sizes of a model and its batches that costs are computed from."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """The sizes that decide what a training step costs."""

    layers: int
    dim: int
    """E, the width of the hidden states"""
    heads: int
    kv_heads: int
    head_dim: int
    feedforward: int
    """matrix weights of one layer's feed-forward that a token meets"""
    persistent: int
    """vectors each head keeps beside the tokens"""
    vocab: int
    block: int
    """T, tokens of one sequence in a step"""
    batch: int
    max_span: int
    """distances a head of full attention looks at"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("feedforward", "persistent") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number, {least} or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; expected a number that divides heads, {self.heads}")

    @property
    def tokens(self) -> int:
        """Tokens of one step, B·T."""
        return self.batch * self.block
