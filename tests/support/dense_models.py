"""Small models of every mechanism with every position encoding, written from their equations: all pairs, in float64.
No feed-forwards; RMS norms stand before each part, and one at the end.

Shapes: B batch, T tokens, S tokens of a source, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spanformer.attention.etc import Structure
from support.content_oracle import by_content
from support.etc_oracle import PARTS, oracle
from support.linear_oracle import WEIGHTS, output
from support.low_rank_oracle import POOLED, pooled
from support.memory_oracle import MEMORIES, remembered
from support.oracles import BY_CONTENT, distances, full, log_weights, parts
from support.position_oracles import PER_LAYER, absolute, rotated, scores, values
from support.state_oracle import STATES, outputs

Padding = Tensor | None
"""[B, T] bool, True where there is no token"""


def lm_logits(model, kinds: tuple[str, ...], position: str, x: Tensor) -> Tensor:
    """[B, T, V] of a language model or an encoder of these layers, for tokens x [B, T]."""
    return through(model, kinds, position, model.embedding.weight[x], None) @ model.head.weight.T


def seq2seq_logits(model, kinds: tuple[str, ...], position: str, source: Tensor, padding: Tensor, x: Tensor) -> Tensor:
    """[B, T, V] for answers x [B, T] to sources [B, S]; the decoder has these layers, the encoder one of spans."""
    table = model.embedding.weight
    states = through(model.encoder, ("adaptive_span",), position, table[source], padding)
    return through(model, kinds, position, table[x], None, states, padding) @ model.head.weight.T


def through(model, kinds, position: str, h: Tensor, padding: Padding, states=None, hidden: Padding = None) -> Tensor:
    """Embedded tokens h [B, T, dim] through all layers. states [B, S, dim] of an encoder, of which some are hidden."""
    top = above(model, h)
    for n, (block, place, kind) in enumerate(zip(model.blocks, model.positions(), kinds, strict=True)):
        if not n or position in PER_LAYER:
            h = h + absolute(place, position, h, n)
        if top is not None:
            segments = (torch.arange(h.shape[1]) // model.summaries.segment).expand(h.shape[:2])
            streams = rms(h, block.norm1), rms(top, block.norm1)
            found, summed = two_streams(block.attention, *streams, Structure(segments))
            h, top = h + found, top + summed
            continue
        h = h + attended(block.attention, kind, place, position, rms(h, block.norm1), padding, model.config.causal)
        if states is not None:
            h = h + listened(block.cross, model.config.cross, rms(h, block.norm3), states, hidden)
    return rms(h, model.norm)


def above(model, h: Tensor) -> Tensor | None:
    """[B, m, dim] ETC's global tokens, one for every segment of a text h [B, T, dim]."""
    summaries = getattr(model, "summaries", None)
    return None if summaries is None else summaries.weight.expand(len(h), -(-h.shape[1] // summaries.segment), -1)


def two_streams(layer, long: Tensor, top: Tensor, structure: Structure) -> tuple[Tensor, Tensor]:
    """[B, T, dim] and [B, m, dim] of ETC's attention among long [B, T, dim] and global tokens [B, m, dim]."""
    m = layer.mechanism
    own = m.own or {"query": layer.query} | {f"{w}_{p}": getattr(layer, w) for w in ("key", "value") for p in PARTS}
    t = {"q_long": split(long, layer.query, m.heads), "q_global": split(top, own["query"], m.heads)}
    for part in PARTS:
        for which in ("key", "value"):
            linear = getattr(layer, which) if part == "l2l" else own[f"{which}_{part}"]
            t[f"{which[0]}_{part}"] = split(long if part[2] == "l" else top, linear, m.heads)
        t[part] = getattr(m, part)
    found, _, summed, _ = oracle(t, structure, m.radius, m.clip, m.hard_g2l)
    return joined(found, layer.out), joined(summed, layer.out)


def attended(layer, kind: str, place, position: str, x: Tensor, padding: Padding, causal: bool) -> Tensor:
    """[B, T, dim] of a layer's attention among x [B, T, dim]."""
    m, d, scoring = layer.mechanism, distances(x), parts(kind)[0].kind
    if scoring in BY_CONTENT:
        q, k, v = (split(x, linear, layer.heads) for linear in (layer.query, layer.key, layer.value))
        return joined(by_content(m, scoring, q, k, v, causal), layer.out)
    if scoring in MEMORIES:
        return joined(remembered(layer, parts(kind)[0], place, position, x), layer.out)
    if scoring in POOLED:
        q, k, v = (split(x, linear, layer.heads) for linear in (layer.query, layer.key, layer.value))
        q, k = (rotated(t, position) for t in (q, k)) if position.startswith("rotary") else (q, k)
        return joined(pooled(m, scoring, q, k, v, padding), layer.out)
    unseen = torch.zeros_like(d, dtype=torch.float64).masked_fill((d < 0) & causal, -math.inf)
    if padding is not None:
        unseen = unseen.masked_fill(padding[:, None, None], -math.inf)

    if scoring in STATES:
        q, k, v = (split(x, linear, layer.heads) for linear in (layer.query, layer.key, layer.value))
        return joined(outputs(scoring, m, x, q, k, v, padding), layer.out)
    if scoring in WEIGHTS:
        q, k, v = (split(x, linear, layer.heads) for linear in (layer.query, layer.key, layer.value))
        weights = scores(place, position, q, k, WEIGHTS[scoring](m, x), d, causal) * unseen.exp()
        return joined(output(scoring, weights, v), layer.out)

    def mixed(p, q: Tensor, weights: Tensor) -> Tensor:
        """by the projections of keys and values that p has"""
        k, v = split(x, p.key, layer.heads), split(x, p.value, layer.heads)
        weight = (scores(place, position, q, k, content_of(m, scoring), d, causal) + weights + unseen).exp()
        total = weight.sum(-1, keepdim=True)
        if getattr(m, "sink_logits", None) is not None:
            total = total + m.sink_logits.exp()[:, None, None]
        a = picked(scoring, weight / torch.where(total == 0, 1, total))  # a row that sees nothing is zeros
        return a @ v + values(place, position, a, d, causal)

    q = mapped(m, scoring, split(x, layer.query, layer.heads))
    out = mixed(layer, q, log_weights(m, kind, x))
    if getattr(m, "positions", ()):  # Longformer's global tokens, the first ones here, have projections of their own
        own, first = mixed(m, split(x, m.query, layer.heads), full(x)), len(m.positions)
        out = torch.cat([own[:, :, :first], out[:, :, first:]], 2)
    return joined(out, layer.out)


def listened(cross, scoring: str, x: Tensor, states: Tensor, hidden: Padding) -> Tensor:
    """[B, T, dim] of a decoder's attention from x [B, T, dim] to all states [B, S, dim] that are not hidden."""
    m = cross.mechanism
    q = mapped(m, scoring, split(x, cross.query, m.heads))
    k, v = split(states, cross.key, m.heads), split(states, cross.value, m.heads)
    s = content_of(m, scoring)(q, k)
    if hidden is not None:
        s = s.masked_fill(hidden[:, None, None], -math.inf)
    return joined(picked(scoring, s.softmax(-1)) @ v, cross.out)


def picked(scoring: str, a: Tensor) -> Tensor:
    """Hard attention takes the last key of the largest weight: straight through, or with no gradient to the weights."""
    if scoring not in ("hard", "hard_sampled"):
        return a
    one = torch.zeros_like(a).scatter(-1, a.shape[-1] - 1 - a.flip(-1).argmax(-1, keepdim=True), 1.0) * (
        a.amax(-1, keepdim=True) > 0
    )
    return one + a - a.detach() if scoring == "hard" else one


def content_of(m, scoring: str):
    if scoring == "additive":
        return lambda q, k: ((q @ m.query)[..., :, None, :] + (k @ m.key)[..., None, :, :]).tanh() @ m.vector
    return lambda q, k: q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])


def mapped(m, scoring: str, q: Tensor) -> Tensor:
    """q as the scorings that are a product with something other than q see it; positions then meet this query."""
    if scoring == "dot":
        return q * math.sqrt(q.shape[3])
    if scoring == "general":
        return q @ m.weight * math.sqrt(q.shape[3])
    if scoring == "bilinear":
        return (q @ m.weight + m.bias) * math.sqrt(q.shape[3])
    return q


def split(x: Tensor, linear, heads: int) -> Tensor:
    """[B, T, dim] → [B, H, T, D]"""
    return (x @ linear.weight.T).view(*x.shape[:2], heads, -1).transpose(1, 2)


def joined(x: Tensor, linear) -> Tensor:
    """[B, H, T, D] → [B, T, dim]"""
    return x.transpose(1, 2).flatten(2) @ linear.weight.T


def rms(x: Tensor, norm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
