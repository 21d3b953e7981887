"""SPALM against its equations in float64, every gradient, and who may be a neighbour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.model.config import EmbeddingConfig
from spanformer.model.lm import LM
from spanformer.model.neighbours import NONE, NeighbourGate
from spanformer.retrieve import Store
from spanformer.retrieve.build import Plan, build_store
from spanformer.retrieve.mixture import Retrieval, Settings
from spanformer.retrieve.model import LmKeys, retrieving
from spanformer.retrieve.spalm import Search, finding, neighbour_tokens, own_entries
from support.small_models import SMALL, make

TIED = replace(SMALL, embedding=EmbeddingConfig(tied=True))
SPALM = replace(TIED, neighbours=3)


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 37, count)


def z_by_hand(lm: LM, h: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """[dim] of one token."""
    assert lm.gate is not None
    y = [lm.embedding.weight[t] for t in tokens if t >= 0]
    if not y:
        return h
    weight = torch.stack([v @ h for v in y]).softmax(0)
    m = torch.stack([w * v for w, v in zip(weight, y, strict=True)]).sum(0)
    g = torch.sigmoid(lm.gate.weight[0] @ h + lm.gate.bias[0])
    return (1 - g) * m + g * h


def model_of() -> LM:
    lm = make(SPALM).double()
    assert lm.gate is not None
    with torch.no_grad():
        lm.gate.weight.normal_(generator=torch.Generator().manual_seed(3))
    return lm


def test_the_state_and_every_gradient_are_those_of_the_equations() -> None:
    lm, g = model_of(), torch.Generator().manual_seed(1)
    assert lm.gate is not None
    neighbours = torch.randint(0, 37, (2, 5, 3), generator=g)
    neighbours[0, 1, 2], neighbours[1, 3] = NONE, NONE
    h = torch.randn(2, 5, 32, generator=g, dtype=torch.float64)
    mine, hand = h.clone().requires_grad_(), h.clone().requires_grad_()
    weights = torch.randn(2, 5, 32, generator=g, dtype=torch.float64)
    parameters = [lm.embedding.weight, lm.gate.weight, lm.gate.bias]
    found = lm.gate.mix(mine, neighbours, lm.embedding)
    truth = torch.stack([torch.stack([z_by_hand(lm, hand[b, t], neighbours[b, t].tolist()) for t in range(5)])
                         for b in range(2)])  # fmt: skip
    assert torch.allclose(found, truth, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((found * weights).sum(), [mine, *parameters])
    theirs = torch.autograd.grad((truth * weights).sum(), [hand, *parameters])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_an_open_gate_and_no_neighbours_leave_the_model_as_it_is() -> None:
    lm, x = model_of(), torch.from_numpy(text(20))[None]
    plain = make(TIED).double()
    plain.load_state_dict({name: t for name, t in lm.state_dict().items() if not name.startswith("gate.")})
    none, logits = torch.full((1, 20, 4), NONE), plain(x).logits
    assert torch.equal(lm(x, neighbours=none).logits, logits)
    assert lm.gate is not None
    with torch.no_grad():
        lm.gate.weight.zero_()
        lm.gate.bias.fill_(800.0)  # g = 1: no memory
    assert torch.equal(lm(x, neighbours=none.clamp_min(3)).logits, logits)
    assert float(torch.sigmoid(NeighbourGate(32).bias.detach())) == pytest.approx(0.9)


def test_a_segment_continues_and_losses_are_those_of_the_logits() -> None:
    lm, x = model_of(), torch.from_numpy(text(31))[None]
    near = torch.from_numpy(text(30 * 4, seed=2)).view(1, 30, 4)
    whole = lm(x[:, :-1], neighbours=near).logits
    first = lm(x[:, :13], neighbours=near[:, :13])
    second = lm(x[:, 13:30], first.state, neighbours=near[:, 13:])
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-9)
    nll = lm(x[:, :-1], neighbours=near, targets=x[:, 1:]).nll
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
    lm = make(SPALM).float()
    assert lm.gate is not None
    x = torch.from_numpy(text(65))[None]
    near = torch.stack([x[:, 1:], x[:, 1:]], -1)  # the answer itself
    optimizer = torch.optim.Adam([*lm.gate.parameters(), lm.embedding.weight], lr=3e-2)
    losses = []
    for _ in range(25):
        loss = lm(x[:, :-1], neighbours=near, targets=x[:, 1:]).nll.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    h = torch.randn(1, 64, 32)
    assert float(torch.sigmoid(lm.gate(h)).detach().mean()) < 0.9  # the gate has opened towards the memory


def test_the_future_changes_neither_neighbours_nor_predictions(tmp_path: Path) -> None:
    keys, lm, x = LmKeys(make(TIED).float()), make(SPALM).float(), text(40)
    build_store(keys, text(90, seed=4), tmp_path, Plan("float32", context=64), shard_entries=64)
    finder = Search(keys, Store(tmp_path), 3)
    with finding(lm, finder):
        before = lm(torch.from_numpy(x)[None]).logits[0, :25]
        after = lm(torch.from_numpy(np.concatenate([x[:25], text(15, seed=5)]))[None]).logits[0, :25]
    assert torch.equal(before, after)
    with pytest.raises(ValueError, match=r"model.neighbours is 0; expected a model that was trained with neighbours"):
        finding(make(TIED), finder).__enter__()
    small = make(replace(SPALM, vocab=20))
    with pytest.raises(ValueError, match="the frozen model has a vocabulary of 37 tokens; expected at most 20"):
        finding(small, finder).__enter__()
    retrieval = Retrieval(Store(tmp_path), Settings())
    with pytest.raises(ValueError, match=r"the model mixes in 3 neighbours itself .model.neighbours.; expected"):
        retrieving(lm, retrieval, keys.maker).__enter__()


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"neighbours has shape .1, 3, 2.; expected .1, 4, k."):
        model_of()(torch.zeros(1, 4, dtype=torch.int64), neighbours=torch.zeros(1, 3, 2, dtype=torch.int64))
