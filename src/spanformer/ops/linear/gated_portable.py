"""Gated linear attention chunk by chunk in plain PyTorch, on any device; autograd derives the gradients.

Within a chunk of c tokens, G the running sum of the gates and S the state before it:

    P_ij = Σ_d q_id k_jd e^(G_id − G_jd), j ≤ i        out = (Q e^G) S + P V        S ← e^(G_c) S + (K e^(G_c − G))ᵀ V

P is no product of two matrices unless e^(−G) is formed, which overflows. A chunk is halved again and again instead: a
pair in different halves of a block has e^(G_i − G_j) = e^(G_i − G_m) e^(G_m − G_j), m the last token of the left half,
and both exponents are at most 0. Shapes: N chunks of c tokens, n blocks of two halves of s tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.ops.linear.matrix_call import MatrixCall

CHUNK = 64


def run_portable(call: MatrixCall) -> tuple[Tensor, Tensor]:
    call, rows, states = call.finite()
    out, state = _run_chunks(call)
    return out.masked_fill(rows[..., None], torch.nan), state.masked_fill(states[..., None, None], torch.nan)


def _run_chunks(call: MatrixCall) -> tuple[Tensor, Tensor]:
    assert call.decay is not None
    (b, _, tokens, size), kv = call.q.shape, call.k.shape[1]
    chunks = -(-tokens // CHUNK)
    fill = chunks * CHUNK - tokens
    # q [B, Hkv, H/Hkv, N, c, D]; k, v, sums [B, Hkv, N, c, ·]; tokens added at the end neither join nor decay
    q = F.pad(call.q.to(call.wide), (0, 0, 0, fill)).view(b, kv, call.shared, chunks, CHUNK, size)
    k, v = (F.pad(t.to(call.wide), (0, 0, 0, fill)).unflatten(2, (chunks, CHUNK)) for t in (call.k, call.v))
    sums = F.pad(call.decay.double(), (0, 0, 0, fill)).unflatten(2, (chunks, CHUNK)).cumsum(3)
    begun = None
    if call.starts is not None:
        begun = F.pad(call.starts, (0, fill)).unflatten(1, (chunks, CHUNK)).cumsum(2)[:, None]  # [B, 1, N, c]
    last = sums[..., -1:, :]
    enter, leave, whole = (t.exp().to(call.wide) for t in (sums, last - sums, last))
    if begun is not None:
        enter, whole = enter * (begun == 0)[..., None], whole * (begun[..., -1:] == 0)[..., None]
        leave = leave * (begun == begun[..., -1:])[..., None]
    out = _inside(q, k, v, sums, begun)
    entering, leaving, earlier, s = q * enter[:, :, None], (k * leave).transpose(3, 4), [], call.initial()
    for n in range(chunks):
        earlier.append(entering[:, :, :, n] @ s[:, :, None])
        s = whole[:, :, n].transpose(2, 3) * s + leaving[:, :, n] @ v[:, :, n]
    out = out + torch.stack(earlier, 3)
    return out.flatten(3, 4).flatten(1, 2)[:, :, :tokens].to(call.v.dtype), s


def _inside(q: Tensor, k: Tensor, v: Tensor, sums: Tensor, begun: Tensor | None) -> Tensor:
    """P V [B, Hkv, H/Hkv, N, c, Dv]: a token's own pair, and then one level of halving after the other."""
    out = (q * k[:, :, None]).sum(-1, keepdim=True) * v[:, :, None]
    s = CHUNK // 2
    while s:
        blocks = (CHUNK // (2 * s), 2, s)
        (_, queries), (keys, _), (values, _) = (t.unflatten(-2, blocks).unbind(-3) for t in (q, k, v))  # [.., n, s, ·]
        left, right = sums.unflatten(-2, blocks).unbind(-3)
        middle = left[..., -1:, :]
        queries = queries * (right - middle).exp().to(q.dtype)[:, :, None]
        keys = keys * (middle - left).exp().to(q.dtype)
        pairs = queries @ keys[:, :, None].transpose(-1, -2)
        if begun is not None:
            earlier, later = begun.unflatten(-1, blocks).unbind(-2)  # [B, 1, N, n, s]
            pairs = pairs * (later[..., None] == earlier[..., None, :])[:, :, None]
        found = pairs @ values[:, :, None]
        out = out + torch.stack([torch.zeros_like(found), found], -3).flatten(-4, -2)
        s //= 2
    return out
