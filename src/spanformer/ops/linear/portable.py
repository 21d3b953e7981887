"""Linear attention chunk by chunk in plain PyTorch, on any device; autograd derives the gradients.

With chunks of c tokens and G the running sum of the decay within a chunk:

    numerator_i = Σ_{j ≤ i} (a_i·b_j) e^(G_i − G_j) v_j + e^(G_i) a_i S        (the denominator with 1 in place of v_j)
    S ← e^(G_c) S + Σ_j e^(G_c − G_j) b_j v_jᵀ

Shapes: N chunks of c tokens, run: a token's document counted from the call's first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.ops.linear.call import LinearCall, LinearState
from spanformer.ops.linear.reference import finish

CHUNK = 64


def run_portable(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    call, spoilt = _finite(call)
    numerator, denominator, state = _run_chunks(call)
    numerator = numerator.masked_fill(spoilt[..., None], torch.nan)
    denominator = denominator.masked_fill(spoilt, torch.nan)
    last = spoilt[:, :: call.a.shape[1] // call.b.shape[1], -1, None]
    after = LinearState(state.s.masked_fill(last[..., None], torch.nan), state.z.masked_fill(last, torch.nan))
    return *finish(call, numerator, denominator), after


def _finite(call: LinearCall) -> tuple[LinearCall, Tensor]:
    """The call with 0 for every NaN and infinity, and which rows [B, H, T] saw one; 0 · NaN would spoil others."""
    tensors = [call.a, call.b, call.v] + ([] if call.decay is None else [call.decay[..., None]])
    good = [t.isfinite() for t in tensors]
    a, b, v, *decay = (torch.where(g, t, 0) for g, t in zip(good, tensors, strict=True))
    wrong = torch.stack([~g.all(3) for g in good[1:]]).any(0)  # [B, Hkv, T]
    count = wrong.cumsum(2)
    if call.starts is not None:
        count = count - torch.where(call.starts[:, None], count - wrong.long(), 0).cummax(2).values
    spoilt = (count > 0).repeat_interleave(a.shape[1] // b.shape[1], 1) | ~good[0].all(3)
    return call._replace(a=a, b=b, v=v, decay=decay[0][..., 0] if decay else None), spoilt


def _run_chunks(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    """Numerator, denominator and state."""
    (rows, heads, tokens, m), kv = call.a.shape, call.b.shape[1]
    shared, chunks = heads // kv, -(-tokens // CHUNK)
    fill = chunks * CHUNK - tokens
    # a [B, Hkv, H/Hkv, N, c, m]; b, v [B, Hkv, N, c, ·]; padding at the end neither joins nor decays
    a = F.pad(call.a.to(call.wide), (0, 0, 0, fill)).view(rows, kv, shared, chunks, CHUNK, m)
    b, v = (F.pad(t.to(call.wide), (0, 0, 0, fill)).unflatten(2, (chunks, CHUNK)) for t in (call.b, call.v))
    sums = a.new_zeros((rows, kv, chunks, CHUNK), dtype=torch.float64)  # strong decays: only differences are small
    if call.decay is not None:
        sums = F.pad(call.decay.double(), (0, fill)).unflatten(2, (chunks, CHUNK)).cumsum(3)
    run = None
    if call.starts is not None:
        run = F.pad(call.starts, (0, fill)).cumsum(1).unflatten(1, (chunks, CHUNK))  # [B, N, c]
    s, z = call.initial()
    numerators, denominators, alive = [], [], torch.zeros(rows, dtype=torch.long, device=a.device)
    for n in range(chunks):
        decayed, last = sums[:, :, n], sums[:, :, n, -1:]
        begun, joins, kept = (t.exp().to(call.wide) for t in (decayed, last - decayed, last))
        queries = a[:, :, :, n] * begun[:, :, None, :, None]
        if run is not None:
            queries = queries * (run[:, n] == alive[:, None])[:, None, None, :, None]
            newest = run[:, n, -1]
            joins = joins * (run[:, n] == newest[:, None])[:, None]
            kept = kept * (alive == newest)[:, None, None]
            alive = newest
        if call.near is None:
            inside = _inside(a[:, :, :, n], b[:, :, n], decayed, None if run is None else run[:, n])
            numerators.append(inside @ v[:, :, None, n] + queries @ s[:, :, None])
            denominators.append(inside.sum(4) + (queries * z[:, :, None, None]).sum(4))
        s = kept[..., None] * s + (b[:, :, n] * joins[..., None]).transpose(2, 3) @ v[:, :, n]
        z = kept * z + (b[:, :, n] * joins[..., None]).sum(2)
    if call.near is not None:
        numerator, denominator = _far_pairs(call)
    else:
        numerator = torch.stack(numerators, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens]
        denominator = torch.stack(denominators, 3).flatten(3, 4).flatten(1, 2)[:, :, :tokens]
    return numerator, denominator, LinearState(s, z)


def _inside(a: Tensor, b: Tensor, sums: Tensor, run: Tensor | None) -> Tensor:
    """[B, Hkv, H/Hkv, c, c] weights of pairs within a chunk."""
    c = a.shape[3]
    seen = torch.ones(c, c, dtype=torch.bool, device=a.device).tril()
    if run is not None:
        seen = (seen & (run[:, :, None] == run[:, None]))[:, None]
    factor = (sums[..., None] - sums[..., None, :]).masked_fill(~seen, -torch.inf).to(a.dtype).exp()
    return (a @ b[:, :, None].transpose(3, 4)) * factor[:, :, None]  # e^(G_i − G_j), 0 where hidden


def _far_pairs(call: LinearCall) -> tuple[Tensor, Tensor]:
    """Pairs weighted by clip((d − near) / ramp, 0, 1), queries by chunks. A chunk's keys that are farther than every
    query's ramp come as one sum."""
    assert call.near is not None
    shared, tokens = call.a.shape[1] // call.b.shape[1], call.v.shape[2]
    a, b, v = (t.to(call.wide) for t in (call.a, call.b, call.v))
    s, z, b, v = (t.repeat_interleave(shared, 1) for t in (*call.initial(), b, v))
    near = call.near.expand(-1, -1, tokens)
    far = near.detach().amax()
    run = None if call.starts is None else call.starts.cumsum(1)
    lag = max(0, int(far + call.ramp) + 1)  # the host waits: the number of keys beside the state is a shape
    numerators, denominators, begin = [], [], 0
    for start in range(0, tokens, CHUNK):
        stop = min(start + CHUNK, tokens)
        upto = max(begin, start - lag)
        joined, alive = slice(begin, upto), None
        if run is not None and upto > begin:
            newest = run[:, upto - 1]
            mine = (run[:, joined] == newest[:, None])[:, None, :, None]
            kept = (run[:, begin - 1 if begin else 0] == newest)[:, None, None, None]
            s = s * kept + (b[:, :, joined] * mine).transpose(2, 3) @ v[:, :, joined]
            z = z * kept[..., 0] + (b[:, :, joined] * mine).sum(2)
        elif upto > begin:
            s = s + b[:, :, joined].transpose(2, 3) @ v[:, :, joined]
            z = z + b[:, :, joined].sum(2)
        begin = upto
        at = torch.arange(start, stop, device=a.device)
        distance = at[:, None] - torch.arange(begin, stop, device=a.device)
        weight = ((distance - near[:, :, start:stop, None]) / call.ramp).clamp(0, 1) * (distance >= 0)
        queries = a[:, :, start:stop]
        if run is not None:
            weight = weight * (run[:, None, start:stop, None] == run[:, None, None, begin:stop])
            alive = (run[:, start:stop] == run[:, begin - 1 if begin else 0, None])[:, None, :, None]
        pairs = (queries @ b[:, :, begin:stop].transpose(2, 3)) * weight
        queries = queries if alive is None else queries * alive
        numerators.append(pairs @ v[:, :, begin:stop] + queries @ s)
        denominators.append(pairs.sum(3) + (queries * z[:, :, None]).sum(3))
    return torch.cat(numerators, 2), torch.cat(denominators, 2)


def run_whole(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    """Both directions: one sum over all keys, or one for each document."""
    if call.decay is not None or call.state is not None or call.near is not None:
        raise ValueError("causal is False beside decay, state or near; expected a causal call, or none of them")
    shared = call.a.shape[1] // call.b.shape[1]
    a, b, v = (t.to(call.wide) for t in (call.a, call.b, call.v))
    if call.starts is None:
        s, z = b.transpose(2, 3) @ v, b.sum(2)
        every, total = s.repeat_interleave(shared, 1), z.repeat_interleave(shared, 1)
        numerator, denominator = a @ every, (a * total[:, :, None]).sum(3)
    else:
        numerator, denominator = _by_document(a, b, v, call.starts, shared)
        s, z = call.initial()
    return *finish(call, numerator, denominator), LinearState(s, z)


def _by_document(a: Tensor, b: Tensor, v: Tensor, starts: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """Tokens see their own document: forward in time, and backward in time without themselves."""
    reversed_starts = torch.zeros_like(starts)
    reversed_starts[:, 1:] = starts.flip(1)[:, :-1]
    plain = LinearCall(a, b, v, None, None, 0.0, starts, None, normalize=False)
    before = _run_chunks(plain)
    after = _run_chunks(plain._replace(a=a.flip(2), b=b.flip(2), v=v.flip(2), starts=reversed_starts))
    b, v = (t.repeat_interleave(shared, 1) for t in (b, v))
    own = (a * b).sum(3)
    numerator = before[0] + after[0].flip(2) - own[..., None] * v
    return numerator, before[1] + after[1].flip(2) - own
