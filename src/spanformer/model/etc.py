"""The global tokens of ETC (Ainslie et al., 2020), https://arxiv.org/abs/2004.08483, before a text's tokens.

    h = [s, …, s, x_1, …, x_n]        one s, a learned vector, for each segment: a sentence, or this many tokens

They go through the same layers as the text (attention/etc.py defines which pairs are visible); their outputs summarise
their segments. Shapes: B batch, n tokens, m = ⌈n / segment⌉ global ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.attention import Attention, GlobalLocal, View
from spanformer.attention.etc_inputs import check_segments


class Summaries(nn.Module):
    def __init__(self, dim: int, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.weight = nn.Parameter(torch.randn(dim) * dim**-0.5)

    def count(self, length: int) -> int:
        """m, of a text of this many tokens."""
        return -(-length // self.segment)

    def forward(self, h: Tensor, padding: Tensor | None, segments: Tensor | None) -> tuple[Tensor, View]:
        """h [B, n, dim] → [B, m + n, dim], and the view of its layers. segments [B, n] integers 0 … m − 1, −1 for
        none; by default of equal length. A global token without tokens is hidden."""
        b, n, _ = h.shape
        if not n:
            raise ValueError("the text is empty; expected at least 1 token for a global token to summarise")
        if segments is not None:
            check_segments(segments, b, n)
        m, at = self.count(n), torch.arange(n, device=h.device)
        above = torch.cat([self.weight.to(h.dtype).expand(b, m, -1), h], 1)
        ids = (at // self.segment).expand(b, n) if segments is None else segments.long()
        if segments is None and padding is None:
            return above, View(segments=ids)
        missing = torch.zeros_like(ids, dtype=torch.bool) if padding is None else padding
        # one more for tokens without a segment, and for ids that the attention refuses later
        bins = torch.where((ids < 0) | missing, m, ids).clamp(0, m)
        empty = torch.ones(b, m + 1, dtype=torch.bool, device=h.device).scatter(1, bins, False)[:, :m]
        return above, View(padding=torch.cat([empty, missing], 1), segments=ids)

    def extra_repr(self) -> str:
        return f"segment={self.segment}"


def make_summaries(dim: int, mechanisms: list[Attention]) -> Summaries | None:
    """The global tokens of a model with ETC layers; None for other models."""
    segments = {m.segment if isinstance(m, GlobalLocal) else 0 for m in mechanisms}
    if segments == {0}:
        return None
    if len(segments) > 1:
        raise ValueError(
            "model.attention.stack mixes etc with other kinds, or etc of different segments; its global tokens go "
            "through all layers, expected etc with the same number of tokens in each"
        )
    return Summaries(dim, segments.pop())
