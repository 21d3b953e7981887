"""Checks of a mechanism with a recurrent state (`attention/recurrent.py`) on tensors by name: q, k, v [B, H, T, D] and
hidden states x [B, T, dim]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.ops import Attended

Tensors = dict[str, Tensor]


def run_pieces(mechanism: Any, t: Tensors, state: Tensors, cuts: Sequence[int]) -> list[Attended]:
    """The results of consecutive pieces, cut at these tokens; each continues from the state of the one before."""
    parts = []
    pieces = [torch.tensor_split(t[name], list(cuts), _tokens(name)) for name in ("q", "k", "v", "x")]
    for q, k, v, x in zip(*pieces, strict=True):
        if q.shape[2]:
            found, state = mechanism.run(q, mechanism.token_inputs(k, v, View(x=x)), state, None, None)
            parts.append(found)
    return parts


def check_advance(mechanism: Any, state: Tensors, texts: Sequence[Tensors]) -> None:
    """`advance` gives the state that `run` leaves, text after text, with padding at both ends."""
    for t in texts:
        padding = torch.zeros(t["x"].shape[:2], dtype=torch.bool)
        padding[0, :5] = padding[1, 30:] = True
        inputs = mechanism.token_inputs(t["k"], t["v"], View(x=t["x"])) | mechanism.query_inputs(t["q"])
        after = mechanism.run(t["q"], inputs, state, padding, None)[1]
        torch.testing.assert_close(mechanism.advance(inputs, state, padding), after)
        state = after


def with_another_future(t: Tensors, cut: int, other: Tensors | None) -> Tensors:
    """The same tensors up to `cut`; then three times those of `other`, or NaN if it is None."""
    changed = {}
    for name, x in t.items():
        at = _tokens(name)
        new = torch.full_like(x, torch.nan) if other is None else 3 * other[name].to(x.dtype)
        changed[name] = torch.cat([x.narrow(at, 0, cut), new.narrow(at, cut, x.shape[at] - cut)], at)
    return changed


def _tokens(name: str) -> int:
    """The axis of tokens."""
    return 1 if name == "x" else 2
