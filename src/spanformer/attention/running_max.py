"""The running maximum over a text, continued from earlier tokens and begun anew with every document.

Shapes: B batch, H heads, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def running_max(x: Tensor, first: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [B, H, T], first [B, H] of earlier tokens, documents [B, T] ids or None → [B, H, T] twice: the maximum before
    each token (−inf where a document begins), and with it."""
    tokens = x.shape[2]
    if documents is None:
        found = torch.maximum(x.cummax(2).values, first[..., None])
        return torch.cat([first[..., None], found[:, :, :-1]], 2), found
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = torch.cat([torch.maximum(x[:, :, :1], first[..., None]), x[:, :, 1:]], 2)
    closed, step = begins[:, None], 1  # closed: a border lies within the tokens that `found` already covers
    while step < tokens:
        earlier = F.pad(found, (step, 0), value=-torch.inf)[:, :, :tokens]
        found = torch.where(closed, found, torch.maximum(found, earlier))
        closed = closed | F.pad(closed, (step, 0), value=True)[:, :, :tokens]
        step *= 2
    before = torch.cat([first[..., None], found[:, :, :-1]], 2)
    return before.masked_fill(begins[:, None], -torch.inf), found
