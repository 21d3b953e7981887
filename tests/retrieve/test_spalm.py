"""SPALM against its equations in float64, every gradient, and who may be a neighbour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.model.config import EmbeddingConfig
from spanformer.retrieve import Store
from spanformer.retrieve.build import Plan, build_store
from spanformer.retrieve.model import LmKeys
from spanformer.retrieve.spalm import NONE, Spalm, neighbour_tokens, own_entries
from support.small_models import CONFIGS, SMALL, make

TIED = replace(SMALL, embedding=EmbeddingConfig(tied=True))


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 37, count)


def z_by_hand(spalm: Spalm, h: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """[dim] of one token."""
    y = [spalm.lm.embedding.weight[t] for t in tokens if t >= 0]
    if not y:
        return h
    weight = torch.stack([v @ h for v in y]).softmax(0)
    m = torch.stack([w * v for w, v in zip(weight, y, strict=True)]).sum(0)
    g = torch.sigmoid(spalm.gate.weight[0] @ h + spalm.gate.bias[0])
    return (1 - g) * m + g * h


def model_of() -> Spalm:
    spalm = Spalm(make(TIED)).double()
    with torch.no_grad():
        spalm.gate.weight.normal_(generator=torch.Generator().manual_seed(3))
    return spalm


def test_the_state_and_every_gradient_are_those_of_the_equations() -> None:
    spalm, g = model_of(), torch.Generator().manual_seed(1)
    neighbours = torch.randint(0, 37, (2, 5, 3), generator=g)
    neighbours[0, 1, 2], neighbours[1, 3] = NONE, NONE
    h = torch.randn(2, 5, 32, generator=g, dtype=torch.float64)
    mine, hand = h.clone().requires_grad_(), h.clone().requires_grad_()
    weights = torch.randn(2, 5, 32, generator=g, dtype=torch.float64)
    parameters = [spalm.lm.embedding.weight, spalm.gate.weight, spalm.gate.bias]
    found = spalm.mix(mine, neighbours)
    truth = torch.stack([torch.stack([z_by_hand(spalm, hand[b, t], neighbours[b, t].tolist()) for t in range(5)])
                         for b in range(2)])  # fmt: skip
    assert torch.allclose(found, truth, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((found * weights).sum(), [mine, *parameters])
    theirs = torch.autograd.grad((truth * weights).sum(), [hand, *parameters])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_an_open_gate_and_no_neighbours_leave_the_model_as_it_is() -> None:
    spalm, x = model_of(), torch.from_numpy(text(20))[None]
    plain = spalm.lm(x).logits
    none = torch.full((1, 20, 4), NONE)
    assert torch.equal(spalm(x, none).logits, plain)
    with torch.no_grad():
        spalm.gate.weight.zero_()
        spalm.gate.bias.fill_(800.0)  # g = 1: no memory
    assert torch.equal(spalm(x, none.clamp_min(3)).logits, plain)
    assert torch.equal(spalm.lm(x).logits, plain)  # the hook is gone
    assert float(torch.sigmoid(Spalm(make(TIED)).gate.bias.detach())) == pytest.approx(0.9)


def test_a_segment_continues_and_losses_are_those_of_the_logits() -> None:
    spalm, x = model_of(), torch.from_numpy(text(31))[None]
    near = torch.from_numpy(text(30 * 4, seed=2)).view(1, 30, 4)
    whole = spalm(x[:, :-1], near).logits
    first = spalm(x[:, :13], near[:, :13])
    second = spalm(x[:, 13:30], near[:, 13:], first.state)
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-9)
    nll = spalm(x[:, :-1], near, targets=x[:, 1:]).nll
    assert torch.allclose(nll, -whole.log_softmax(-1).gather(2, x[:, 1:, None])[..., 0], atol=1e-9)


def test_own_entries_and_copies_are_no_neighbours(tmp_path: Path) -> None:
    keys = LmKeys(make(TIED).float())
    passage = text(64, seed=7)  # as long as a window, so that both copies have the same keys
    ids = np.concatenate([text(64), passage, text(64, seed=1), passage, text(30, seed=2)])
    build_store(keys, ids, tmp_path, Plan("float32", context=64), shard_entries=64)
    store = Store(tmp_path)
    own = own_entries(store, ids)
    assert own.tolist() == list(range(len(ids) - 1))
    found = neighbour_tokens(keys, store, ids, 1, window=0, copy=0)
    with_itself = neighbour_tokens(keys, store, np.append(ids, 0), 1, window=0, copy=0)[:-1]  # another text
    assert (with_itself[:, 0] == ids[1:]).mean() > 0.98  # nearest is itself (or its copy): the answer
    assert (found[:, 0] == ids[1:]).mean() < 0.6
    inside = slice(72, 127)  # of the passage: its second copy is nearest, until copies are left out
    assert (found[inside, 0] == ids[73:128]).mean() > 0.9
    without = neighbour_tokens(keys, store, ids, 1, window=4, copy=6)
    assert (without[inside, 0] == ids[73:128]).mean() < 0.5
    assert neighbour_tokens(keys, store, text(20, seed=9), 300).shape == (19, 300)
    few = neighbour_tokens(keys, store, ids, 400)
    assert (few[:, -1] == NONE).all() and (few[:, 0] != NONE).all()


def test_training_learns_to_use_neighbours() -> None:
    torch.manual_seed(0)
    spalm = Spalm(make(TIED).float())
    x = torch.from_numpy(text(65))[None]
    near = torch.stack([x[:, 1:], x[:, 1:]], -1)  # the answer itself
    optimizer = torch.optim.Adam([*spalm.gate.parameters(), spalm.lm.embedding.weight], lr=3e-2)
    losses = []
    for _ in range(25):
        loss = spalm(x[:, :-1], near, targets=x[:, 1:]).nll.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    h = torch.randn(1, 64, 32)
    assert float(torch.sigmoid(spalm.gate(h)).detach().mean()) < 0.9  # the gate has opened towards the memory


@pytest.mark.parametrize("name", ["rotary", "adaptive embedding"])
def test_models_without_one_tied_embedding_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the model's output layer is not tied to one embedding of all tokens"):
        Spalm(make(CONFIGS[name]))


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"neighbours has shape .1, 3, 2.; expected .1, 4, k."):
        model_of()(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, 2, dtype=torch.int64))
