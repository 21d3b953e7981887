"""The sizes of an attention layer, and counts derived from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

LSE = 4
"""bytes of a log-sum-exp, which is stored in float32"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention layer."""

    length: int
    heads: int
    head_dim: int
    kv_heads: int = 0
    """0: as many as heads"""
    batch: int = 1
    layers: int = 1
    """number of equal layers, counted together"""
    item: int = 4
    """bytes per number"""
    causal: bool = True
    width: int = 0
    """size of hidden states; 0: heads · head size, for all heads of a layer"""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.name in ("kv_heads", "width") else 1
            if each.name != "causal" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{each.name} is {value!r}; expected a whole number, {least} or more")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; expected a number that divides heads, {self.heads}")

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        """Size of hidden states."""
        return self.width or self.heads * self.head_dim

    @property
    def times(self) -> int:
        """Number of (text, layer) combinations."""
        return self.batch * self.layers

    @property
    def rows(self) -> int:
        """Number of queries of all heads, for one text and layer."""
        return self.heads * self.length

    @property
    def queried(self) -> int:
        """Number of elements of q, and of the output."""
        return self.rows * self.head_dim

    @property
    def keyed(self) -> int:
        """Number of elements of k and v together."""
        return 2 * self.groups * self.length * self.head_dim

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights of all pairs."""
        return self.item * self.times * self.rows * self.length

    @property
    def kept_bytes(self) -> int:
        """Bytes that the kernel stores instead."""
        return LSE * self.times * self.rows
