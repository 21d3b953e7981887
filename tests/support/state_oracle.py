"""Gated linear attention and gated delta networks from their equations: one token after the other, one text at a time.

Shapes: B batch, H heads (and as many key/value heads), T tokens, D head size. x [B, T, dim] is what a layer's queries
and keys are made of, m its mechanism.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gated_linear(m, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y [H, T, D] of one text: x [T, dim], the others [H, T, D]."""
    alpha = (x @ m.down.T @ m.up.T + m.bias).sigmoid() ** (1 / 16)  # [T, H · D]
    state, found = torch.zeros(q.shape[0], q.shape[2], q.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        state = alpha[t].view(*q[:, t].shape, 1) * state + torch.einsum("hd,he->hde", k[:, t], v[:, t])
        found.append(torch.einsum("hde,hd->he", state, q[:, t]))
    return torch.stack(found, 1)


def gated_delta(m, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def silu(t: Tensor) -> Tensor:
        return t / (1 + (-t).exp())

    def convolved(name: str, t: Tensor) -> Tensor:
        if not m.conv:
            return t
        weight, rows = m.convolutions[name].weight, range(t.shape[1])
        taps = [[weight[:, :, m.conv - 1 - n] * t[:, i - n] for n in range(m.conv) if n <= i] for i in rows]
        return torch.stack([sum(each[1:], each[0]) for each in taps], 1)

    def unit(t: Tensor) -> Tensor:
        return t / (t * t).sum(-1, keepdim=True).sqrt()

    q, k, v = (silu(convolved(name, t)) for name, t in (("q", q), ("k", k), ("v", v)))
    q, k = unit(q), unit(k)
    beta = 1 / (1 + (-(x @ m.beta.T)).exp())
    fade = (-m.log_rate.exp() * (1 + (x @ m.decay.T + m.bias).exp()).log()).exp()
    state, found = torch.zeros(q.shape[0], q.shape[2], q.shape[2], dtype=x.dtype), []
    for t in range(len(x)):
        state = fade[t][:, None, None] * state
        held = torch.einsum("hde,hd->he", state, k[:, t])
        state = state + beta[t][:, None, None] * torch.einsum("hd,he->hde", k[:, t], v[:, t] - held)
        found.append(torch.einsum("hde,hd->he", state, q[:, t]))
    return torch.stack(found, 1)


STATES: dict[str, Callable[..., Tensor]] = {"gated_linear": gated_linear, "gated_delta": gated_delta}
"""by the kind's name"""


def outputs(kind: str, m, x: Tensor, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    """[B, H, T, D] of x [B, T, dim] and q, k, v [B, H, T, D]: normed and gated; 0 where there is padding."""
    rows = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if padding is None else ~padding[b]
        y = STATES[kind](m, x[b, real], *(t[b, :, real] for t in (q, k, v))) / q.shape[3] ** 0.5
        gate = (x[b, real] @ m.out_gate.T).view(-1, *q.shape[1:2], q.shape[3]).transpose(0, 1)
        normed = y / ((y * y).mean(-1, keepdim=True) + 1e-6).sqrt() * m.norm * gate * gate.sigmoid()
        rows.append(torch.zeros_like(q[b]).index_copy(1, real.nonzero()[:, 0], normed))
    return torch.stack(rows)
