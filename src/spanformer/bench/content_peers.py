"""Part peers of `bench content`: other packages' LSH, routing and Linformer attention.

Their arguments are as near to ours as they allow; each is compared with what it computes itself (content_oracles.py).
Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spanformer.attention import View
from spanformer.attention.bucketed import Bucketed
from spanformer.bench import content_oracles as oracles
from spanformer.bench.content_work import MEASURED
from spanformer.bench.gallery import DIM, HEADS
from spanformer.bench.linear_work import Inputs, make_kind, make_text, of_mechanism
from spanformer.bench.peer_tasks import Peer, Task

BUCKET, ROUNDS, WINDOW, RANK = 64, 4, 64, 256
SAME = 1e-6
"""a row that changes less has not changed: rounding differs with the place of a token among the sorted ones"""


def _shared(length: int) -> dict[str, Tensor]:
    """Queries that are the keys too."""
    return {name: t for name, t in make_text(length).items() if name not in ("x", "k")}


def _ours(kind: str, length: int, oracle: Callable[[Bucketed, Inputs], Tensor]) -> Peer:
    mechanism = make_kind(kind, length)
    assert isinstance(mechanism, Bucketed)
    forward = of_mechanism(mechanism).forward
    return Peer(lambda i: forward({"k": i["q"], "x": i["q"][:, 0], **i}), functools.partial(oracle, mechanism))


def _reformer_pytorch(length: int) -> Peer:
    """It draws rotations in every call, so that the generator is set back before each."""
    attention = importlib.import_module("reformer_pytorch").LSHAttention(
        bucket_size=BUCKET, n_hashes=ROUNDS, causal=True
    )
    shape = 1, DIM, ROUNDS, length // BUCKET // 2
    rotations = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def forward(inputs: Inputs) -> Tensor:
        q, v = inputs["q"], inputs["v"]
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return attention(q.flatten(0, 1), v.flatten(0, 1))[0].view(q.shape)

    return Peer(forward, functools.partial(oracles.reformer_pytorch, rotations, BUCKET), aim=4.5)


def _routing_transformer(length: int) -> Peer:
    attention = importlib.import_module("routing_transformer.routing_transformer").KmeansAttention(
        length // WINDOW, WINDOW, HEADS, DIM, causal=True, shared_qk=True
    )
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        q = _shared(length)["q"].detach()
        attention(q, q, q)  # its first call finds the centroids; without `update` they stay, in training too
    oracle = functools.partial(oracles.routing_transformer, attention.kmeans.means.clone(), WINDOW)
    return Peer(lambda i: attention(i["q"], i["q"], i["v"])[0], oracle, aim=2.5)


def _projected(length: int) -> dict[str, Tensor]:
    """With E and F [1, rank, T], which are learned."""
    g, rank = torch.Generator().manual_seed(3), min(RANK, length)
    learned = {name: torch.randn(1, rank, length, generator=g) * length**-0.5 for name in ("e", "f")}
    inputs = {name: t for name, t in make_text(length).items() if name != "x"}
    return inputs | {name: t.requires_grad_() for name, t in learned.items()}


def _our_linformer(length: int) -> Peer:
    mechanism = make_kind(f"linformer({min(RANK, length)}, {length}, headwise)", length)
    rule = mechanism.rule(View())

    def forward(inputs: Inputs) -> Tensor:
        learned = {name: inputs[name] for name in ("e", "f")}
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        return torch.func.functional_call(mechanism, learned, (q, k, v, rule, View())).out

    return Peer(forward, oracles.linformer)


class _Given(nn.Module):
    """In the place of a projection: a tensor that is given."""

    value: Tensor

    def forward(self, _x: Tensor) -> Tensor:
        return self.value


def _linformer(length: int) -> Peer:
    attention = importlib.import_module("linformer.linformer").LinformerSelfAttention(
        HEADS * DIM, length, k=min(RANK, length), heads=HEADS
    )
    given = attention.to_q, attention.to_k, attention.to_v = _Given(), _Given(), _Given()
    attention.to_out = nn.Identity()

    def forward(inputs: Inputs) -> Tensor:
        q = inputs["q"]
        for each, name in zip(given, ("q", "k", "v"), strict=True):
            each.value = inputs[name].transpose(1, 2).flatten(2)
        learned = {"proj_k": inputs["e"][0].mT, "proj_v": inputs["f"][0].mT}
        out = torch.func.functional_call(attention, learned, (given[0].value,))
        return out.view(len(q), q.shape[2], q.shape[1], -1).transpose(1, 2)

    return Peer(forward, oracles.linformer, aim=1.0)


def tasks(length: int) -> dict[str, Task]:
    """For texts of this length."""
    of = functools.partial
    lsh, routing = MEASURED[0].kind(length), f"routing({WINDOW}, {length // WINDOW})"
    return {
        "LSH, 4 rounds": Task(
            length, _shared, of(_ours, lsh, length, oracles.lsh),
            {"reformer-pytorch": of(_reformer_pytorch, length)}, quick=length, same=SAME,
        ),
        "routing, w 64": Task(
            length, _shared, of(_ours, routing, length, oracles.routing),
            {"routing-transformer": of(_routing_transformer, length)}, quick=length, same=SAME,
        ),
        "Linformer 256, both directions": Task(
            length, _projected, of(_our_linformer, length), {"linformer": of(_linformer, length)}, quick=length,
        ),
    }  # fmt: skip
