"""The result of attention: its output, and the logarithm of the softmax's denominator."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """out [B, H, Tq, Dv] and lse [B, H, Tq], the natural log of the softmax's denominator (−inf for a row that saw no
    key). Both are differentiable, so attention over disjoint keys can be merged by lse."""

    out: Tensor
    lse: Tensor
