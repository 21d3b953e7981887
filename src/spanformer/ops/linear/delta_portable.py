"""The gated delta rule chunk by chunk in plain PyTorch, on any device; autograd derives the gradients.

Within a chunk of c tokens, with S the state before it, G the running sum of the decay and L_ij = e^(G_i − G_j), j ≤ i:

    (I + β M) U = β (V − e^G K S),  M_ij = L_ij k_i·k_j for j < i        out = e^G Q S + P U,  P_ij = L_ij q_i·k_j
    S ← e^(G_c) S + Σ_j e^(G_c − G_j) k_j u_jᵀ

Yang et al., 2024 (https://arxiv.org/abs/2406.06484). Shapes: N chunks of c tokens, run: a token's document counted from
the call's first.
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
    assert call.beta is not None
    (b, _, tokens, size), kv = call.q.shape, call.k.shape[1]
    chunks = -(-tokens // CHUNK)
    fill = chunks * CHUNK - tokens
    # q [B, Hkv, H/Hkv, N, c, D]; k, v [B, Hkv, N, c, ·]; tokens added at the end neither join nor decay
    q = F.pad(call.q.to(call.wide), (0, 0, 0, fill)).view(b, kv, call.shared, chunks, CHUNK, size)
    k, v = (F.pad(t.to(call.wide), (0, 0, 0, fill)).unflatten(2, (chunks, CHUNK)) for t in (call.k, call.v))
    beta = F.pad(call.beta, (0, fill)).unflatten(2, (chunks, CHUNK))[..., None]
    pairs, enter, leave, whole = chunk_decays(call, chunks, fill)
    inside = (k @ k.transpose(3, 4)) * pairs.tril(-1)
    lower = torch.eye(CHUNK, dtype=call.wide, device=k.device) + beta * inside
    right = beta * torch.cat([v, k * enter], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[4], size], -1)
    weights = (q @ k[:, :, None].transpose(4, 5)) * pairs[:, :, None]
    s, outs = call.initial(), []
    for n in range(chunks):
        u = values[:, :, n] - keys[:, :, n] @ s
        earlier = (q[:, :, :, n] * enter[:, :, None, n]) @ s[:, :, None]
        outs.append(earlier + weights[:, :, :, n] @ u[:, :, None])
        s = whole[:, :, n] * s + (k[:, :, n] * leave[:, :, n]).transpose(2, 3) @ u
    out = torch.stack(outs, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens]
    return out.to(call.v.dtype), s


def chunk_decays(call: MatrixCall, chunks: int, fill: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e^(G_i − G_j) [B, Hkv, N, c, c], 0 above the diagonal; e^(G_i) and e^(G_c − G_i) [B, Hkv, N, c, 1]; e^(G_c)
    [B, Hkv, N, 1, 1]. All are 0 across a document's beginning."""
    b, kv, c = *call.k.shape[:2], CHUNK
    sums = call.v.new_zeros((b, kv, chunks, c), dtype=torch.float64)  # strong decays: only differences are small
    if call.decay is not None:
        sums = F.pad(call.decay.double(), (0, fill)).unflatten(2, (chunks, c)).cumsum(3)
    seen = torch.ones(c, c, dtype=torch.bool, device=sums.device).tril()
    last = sums[..., -1:]
    enter, leave, whole = sums.exp(), (last - sums).exp(), last.exp()
    if call.starts is not None:
        begun = F.pad(call.starts, (0, fill)).unflatten(1, (chunks, c)).cumsum(2)[:, None]  # [B, 1, N, c]
        seen = seen & (begun[..., None] == begun[..., None, :])
        enter, whole = enter * (begun == 0), whole * (begun[..., -1:] == 0)
        leave = leave * (begun == begun[..., -1:])
    pairs = (sums[..., None] - sums[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    return tuple(t.to(call.wide) for t in (pairs, enter[..., None], leave[..., None], whole[..., None]))  # pyright: ignore
