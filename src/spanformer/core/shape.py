"""The sizes of a model and its batches, from which costs are computed."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the cost of a training step."""

    layers: int
    dim: int
    """E, the width of the hidden states"""
    heads: int
    kv_heads: int
    head_dim: int
    feedforward: int
    """feed-forward weights per layer that each token is multiplied with"""
    persistent: int
    """persistent vectors per head"""
    vocab: int
    block: int
    """T, tokens per sequence and step"""
    batch: int
    max_span: int
    """number of distances that a head of full attention sees"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("feedforward", "persistent") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name} is {value!r}; expected a whole number, {least} or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; expected a number that divides heads, {self.heads}")

    @property
    def tokens(self) -> int:
        """Tokens per step, B·T."""
        return self.batch * self.block
