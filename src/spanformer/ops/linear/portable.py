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
from spanformer.ops.linear.reference import far_weight, finish

CHUNK = 64


def run_portable(call: LinearCall) -> tuple[Tensor, Tensor, LinearState | None]:
    call, spoilt = _finite(call)
    numerator, denominator, state = _far_pairs(call) if call.near is not None else _run_chunks(call)
    numerator = numerator.masked_fill(spoilt[..., None], torch.nan)
    denominator = denominator.masked_fill(spoilt, torch.nan)
    if state is None:
        return *finish(call, numerator, denominator), None
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
    seen = (count > 0)[:, :, b.shape[2] - a.shape[2] :]
    spoilt = seen.repeat_interleave(a.shape[1] // b.shape[1], 1) | ~good[0].all(3)
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
        inside = _inside(a[:, :, :, n], b[:, :, n], decayed, None if run is None else run[:, n])
        numerators.append(inside @ v[:, :, None, n] + queries @ s[:, :, None])
        denominators.append(inside.sum(4) + (queries * z[:, :, None, None]).sum(4))
        s = kept[..., None] * s + (b[:, :, n] * joins[..., None]).transpose(2, 3) @ v[:, :, n]
        z = kept * z + (b[:, :, n] * joins[..., None]).sum(2)
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


def _far_pairs(call: LinearCall) -> tuple[Tensor, Tensor, None]:
    """Pairs weighted by clip((d − near) / ramp, 0, 1), queries by chunks. A chunk's keys that are farther than every
    query's ramp come as one sum."""
    assert call.near is not None
    (_, heads, queries, _), tokens = call.a.shape, call.v.shape[2]
    shared, skipped = heads // call.b.shape[1], tokens - queries
    a, b, v = (t.to(call.wide) for t in (call.a, call.b, call.v))
    s, z, b, v = (t.repeat_interleave(shared, 1) for t in (*call.initial(), b, v))
    near = call.near.expand(-1, -1, queries)
    run = v.new_zeros((len(v), tokens), dtype=torch.long) if call.starts is None else call.starts.cumsum(1)
    lag = max(0, int(near.detach().amax() + call.ramp) + 1)  # the host waits: how many keys stay pairs is a shape
    numerators, denominators, begin, alive = [], [], 0, torch.zeros_like(run[:, 0])
    for start in range(skipped, tokens, CHUNK):
        stop, upto = min(start + CHUNK, tokens), max(begin, start - lag)
        if upto > begin:
            newest, joined = run[:, upto - 1], slice(begin, upto)
            mine = (run[:, joined] == newest[:, None])[:, None, :, None]
            kept = (alive == newest)[:, None, None, None]
            s = s * kept + (b[:, :, joined] * mine).transpose(2, 3) @ v[:, :, joined]
            z = z * kept[..., 0] + (b[:, :, joined] * mine).sum(2)
            begin, alive = upto, newest
        rows = slice(start - skipped, stop - skipped)
        at = torch.arange(begin, stop, device=a.device)
        distance = at[start - begin :, None] - at
        weight = far_weight(distance, near[:, :, rows], call.ramp)
        weight = weight * (run[:, None, start:stop, None] == run[:, None, None, begin:stop])
        pairs = (a[:, :, rows] @ b[:, :, begin:stop].transpose(2, 3)) * weight
        earlier = a[:, :, rows] * (run[:, start:stop] == alive[:, None])[:, None, :, None]
        numerators.append(pairs @ v[:, :, begin:stop] + earlier @ s)
        denominators.append(pairs.sum(3) + (earlier * z[:, :, None]).sum(3))
    return torch.cat(numerators, 2), torch.cat(denominators, 2), None


def run_whole(call: LinearCall) -> tuple[Tensor, Tensor, LinearState]:
    """Both directions: one sum over all keys, or one for each document."""
    if call.decay is not None or call.state is not None:
        raise ValueError("causal is False beside decay or state; expected a causal call, or none of them")
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
    plain = LinearCall(a, b, v, None, None, 0.0, starts, None, None)
    before = _run_chunks(plain)
    after = _run_chunks(plain._replace(a=a.flip(2), b=b.flip(2), v=v.flip(2), starts=reversed_starts))
    b, v = (t.repeat_interleave(shared, 1) for t in (b, v))
    own = (a * b).sum(3)
    numerator = before[0] + after[0].flip(2) - own[..., None] * v
    return numerator, before[1] + after[1].flip(2) - own
