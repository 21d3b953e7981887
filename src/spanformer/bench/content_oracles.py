"""What ours and the peers of `bench content` compute, from the equations, in any dtype: their oracles in float64.

Each takes the inputs and returns out [B, H, T, D]. Which tokens meet is decided in float32, as in what is checked.
Shapes: B batch, H heads, R rounds, T tokens, C clusters, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention.bucketed import Bucketed
from spanformer.bench.linear_oracles import by_head
from spanformer.bench.linear_work import Inputs
from spanformer.ops.buckets import sort_tokens

ALONE = -5e4
"""the score that both packages give to a token with itself"""


def lsh(mechanism: Bucketed, inputs: Inputs) -> Tensor:
    """Of all rounds, the last w tokens of the own bucket; itself, if there is none."""

    def one(head: Inputs) -> Tensor:
        q, v = head["q"], head["v"]
        seen = _seen(head["ids"], mechanism.window, itself=False)
        score = (q @ F.normalize(q, dim=3).mT).masked_fill(~seen, -math.inf)
        nothing = ~seen.any(3, keepdim=True)
        return torch.where(nothing, v, score.masked_fill(nothing, 0).softmax(3) @ v)

    return by_head(one)({**inputs, "ids": _ids(mechanism, inputs)})


def routing(mechanism: Bucketed, inputs: Inputs) -> Tensor:
    """The last w tokens of the own cluster, itself among them."""

    def one(head: Inputs) -> Tensor:
        x = F.layer_norm(head["q"], head["q"].shape[3:])
        seen = _seen(head["ids"], mechanism.window, itself=True)
        return (x @ x.mT * x.shape[3] ** -0.5).masked_fill(~seen, -math.inf).softmax(3) @ head["v"]

    return by_head(one)({**inputs, "ids": _ids(mechanism, inputs)})


@torch.no_grad()
def _ids(mechanism: Bucketed, inputs: Inputs) -> Tensor:
    return mechanism.hashed(mechanism.queries(inputs["q"].float()))


def _seen(ids: Tensor, window: int, *, itself: bool) -> Tensor:
    """ids [1, 1, R, T] → [1, 1, T, T] bool"""
    seen = torch.zeros((), dtype=torch.bool)
    for each in ids.unbind(2):
        place = sort_tokens(each[0, :, None]).inverse
        back = place[..., :, None] - place[..., None, :]
        near = (back >= 0) & (back < window) if itself else (back > 0) & (back <= window)
        seen = seen | ((each[..., :, None] == each[..., None, :]) & near)
    return seen


def reformer_pytorch(rotations: Tensor, size: int, inputs: Inputs) -> Tensor:
    """Rounds are sorted and laid end to end; chunks of `size` see themselves and the chunk before, whichever round or
    bucket it is of. Scores have a further 1/√D, and rounds are averaged by their sums. rotations [1, D, R, columns]"""
    q, v = inputs["q"].flatten(0, 1), inputs["v"].flatten(0, 1)
    (n, t, d), rounds = q.shape, rotations.shape[2]
    turned = torch.einsum("btf,bfhi->bhti", q.detach().float(), rotations.expand(n, -1, -1, -1))
    ids = torch.cat([turned, -turned], -1).argmax(-1)
    order = (ids * t + torch.arange(t)).argsort(-1)  # [N, R, T]
    at = order.view(n, -1, size)
    row = torch.arange(n)[:, None, None]
    k = F.normalize(q, dim=-1)[row, at]

    def two(x: Tensor) -> Tensor:
        return torch.cat([x, x.roll(1, 1)], 2)

    keys = two(at)
    score = q[row, at] @ two(k).mT * d**-0.5
    score = score.masked_fill(at[..., None] < keys[..., None, :], torch.finfo(score.dtype).min)
    score = score.masked_fill(at[..., None] == keys[..., None, :], ALONE)
    back, lse = order.argsort(-1), score.logsumexp(-1)
    weight = (
        score - lse[..., None]
    ).exp()  # not softmax: around −5e4 lse has three digits in float32, and so have they
    out = (weight @ two(v[row, at])).view(n, rounds, t, -1)
    lse = lse.view(n, rounds, t).gather(2, back)
    out = out.gather(2, back[..., None].expand(out.shape))
    share = (lse - lse.logsumexp(1, keepdim=True)).exp()
    return (out * share[..., None]).sum(1).view(inputs["q"].shape)


def routing_transformer(means: Tensor, window: int, inputs: Inputs) -> Tensor:
    """Each cluster takes its nearest tokens, whatever their positions; a token gets the mean of its clusters. means
    [H, C, D]"""

    def one(head: Inputs) -> Tensor:
        q, v, mean = head["q"][0, 0], head["v"][0, 0], head["means"][0, 0]
        at = (F.normalize(q.detach().float(), dim=-1) @ mean.float().mT).topk(window, 0).indices.mT  # [C, w]
        score = q[at] @ F.normalize(q, dim=-1)[at].mT * q.shape[1] ** -0.5
        score = score.masked_fill(at[:, :, None] < at[:, None], torch.finfo(score.dtype).min)
        score = score.masked_fill(torch.eye(window, dtype=torch.bool), ALONE)
        found = (score.softmax(-1) @ v[at]).flatten(0, 1)
        many = torch.zeros(len(q), dtype=q.dtype).index_add(0, at.flatten(), torch.ones(at.numel(), dtype=q.dtype))
        out = torch.zeros_like(v).index_add(0, at.flatten(), found) / (many[:, None] + 1e-5)
        return out[None, None]

    return by_head(one)({**inputs, "means": means[None]})


def linformer(inputs: Inputs) -> Tensor:
    """e and f [1, r, T]"""
    q, k, v = inputs["q"], inputs["e"] @ inputs["k"], inputs["f"] @ inputs["v"]
    return (q @ k.mT * q.shape[3] ** -0.5).softmax(3) @ v
