"""kNN-LM against its definition in float64, and its limits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.retrieve import Header, Settings, Store, mixed_log_probs, mixed_nll
from spanformer.retrieve.fit import Seen, best_share, fit, shared_runs
from spanformer.retrieve.mixture import Gate, Retrieval
from spanformer.retrieve.search import Neighbours, search
from spanformer.retrieve.writer import open_writer
from support.stores import DIM, MAKER, VOCAB, knn_by_hand, make_store, random_keys, random_tokens


def logits_of(count: int) -> torch.Tensor:
    return 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("keys", ["float32", "float16", "int8"])
@pytest.mark.parametrize("temperature", [0.7, 30.0, 1e-4, 1e6])
@pytest.mark.parametrize("k, share", [(1, 0.25), (33, 0.6), (500, 0.01)])
def test_probabilities_are_those_of_the_definition(
    tmp_path: Path, keys, temperature: float, k: int, share: float
) -> None:
    store, queries, logits = make_store(tmp_path, 101, keys=keys), random_keys(5, seed=4), logits_of(5)
    read = torch.cat([p.keys.double() * (1.0 if p.scales is None else p.scales[:, None].double()) for p in store.parts])
    retrieval = Retrieval(store, Settings(k, temperature, share))
    found = mixed_log_probs(retrieval, queries, logits).exp()
    p_lm = logits.double().softmax(-1)
    near = torch.stack([knn_by_hand(read, store.tokens, q, k, temperature) for q in queries])
    truth = share * near + (1 - share) * p_lm
    assert float(((found - truth).abs() / truth).max()) <= 1e-6
    assert float((found.sum(-1) - 1).abs().max()) <= 1e-6
    targets = torch.tensor([3, 1, 4, 1, 5])
    nll = -p_lm.log().gather(1, targets[:, None])[:, 0]
    losses = mixed_nll(retrieval, queries, nll, targets)
    assert torch.allclose(losses, -truth.log().gather(1, targets[:, None])[:, 0], rtol=1e-9)


def test_the_limits_of_temperature(tmp_path: Path) -> None:
    store, queries, logits = make_store(tmp_path, 60), random_keys(4, seed=4), logits_of(4)
    ids = search(store, queries, 5).ids
    cold, hot = (mixed_log_probs(Retrieval(store, Settings(5, t, 1.0)), queries, logits).exp() for t in (0, math.inf))
    for row in range(4):
        assert cold[row, store.tokens[ids[row, 0]]] == 1
        expected = np.bincount(store.tokens[ids[row]], minlength=VOCAB) / 5
        assert np.allclose(hot[row].numpy(), expected)


def test_distances_that_underflow_still_have_a_nearest(tmp_path: Path) -> None:
    """exp(−d²/T) of every neighbour is 0 in float64."""
    store = make_store(tmp_path, 60)
    found = mixed_log_probs(Retrieval(store, Settings(4, 1e-3, 0.5)), random_keys(2, seed=4) + 50, logits_of(2)).exp()
    assert torch.allclose(found.sum(-1), torch.ones(2, dtype=torch.float64))
    assert bool((found.amax(1) >= 0.5).all())


@pytest.mark.parametrize("case", ["share 0", "empty", "not finite"])
def test_without_neighbours_the_loss_is_the_lms(tmp_path: Path, case: str) -> None:
    if case == "empty":
        with open_writer(tmp_path, Header(DIM, VOCAB, MAKER)):
            pass
        store = Store(tmp_path)
    else:
        store = make_store(tmp_path, 60)
    odd: list[int] = []
    retrieval = Retrieval(store, Settings(4, 1.0, 0.0 if case == "share 0" else 0.5), odd.append)
    queries, nll = random_keys(3), torch.tensor([1.5, 2.5, 3.5])
    if case == "not finite":
        queries = queries / 0 * 0
    assert torch.equal(mixed_nll(retrieval, queries, nll, torch.tensor([1, 2, 3])), nll.double())
    assert odd == ([3] if case == "not finite" else []) and retrieval.searched == 0 and retrieval.asked == 3
    assert retrieval.idle == (case != "not finite")
    found = mixed_log_probs(retrieval, queries, logits_of(3))
    assert torch.equal(found, logits_of(3).double().log_softmax(-1))


def test_a_gate_skips_searches(tmp_path: Path) -> None:
    store, queries, logits = make_store(tmp_path, 60), random_keys(20, seed=4), logits_of(20)
    weight = [0.0, 0.0, 5.0] + [0.0] * (DIM - 1)  # on the first number of the key
    gate = Gate([0.0] * (DIM + 2), [1.0] * (DIM + 2), weight, 0.0, 0.5)
    retrieval = Retrieval(store, Settings(4, 9.0, 0.3, gate))
    found = mixed_log_probs(retrieval, queries, logits)
    skipped = queries[:, 0] < 0
    assert retrieval.searched == int((~skipped).sum()) and retrieval.asked == 20
    assert torch.equal(found[skipped], logits.double().log_softmax(-1)[skipped])
    for n in (~skipped).nonzero()[:, 0].tolist():
        share = torch.sigmoid(5 * queries[n, 0].double())
        near = knn_by_hand(random_keys(60), store.tokens, queries[n], 4, 9.0)
        truth = share * near + (1 - share) * logits[n].double().softmax(-1)
        assert torch.allclose(found[n].exp(), truth, rtol=1e-6)
    with pytest.raises(ValueError, match="the gate has 26 weights; expected 11"):
        gate(queries[:, :9], logits)


def seen_of(count: int, *, helpful: bool) -> Seen:
    """Half of the tokens have a neighbour with the right token, if the datastore is helpful at all."""
    g = torch.Generator().manual_seed(0)
    distances = 10 * torch.rand(count, 8, generator=g, dtype=torch.float64).sort(1).values + 5
    x = torch.randn(count, 2 + DIM, generator=g, dtype=torch.float64)
    right = torch.rand(count, 8, generator=g) < 0.4
    right &= (x[:, 3] > 0)[:, None] & helpful
    nll = 3 * torch.rand(count, generator=g, dtype=torch.float64) + 0.5
    return Seen(nll, Neighbours(distances, torch.zeros(count, 8, dtype=torch.int64), torch.ones(count) > 0), right, x)


def test_fitting_never_makes_the_loss_larger() -> None:
    settings, before, after = fit(seen_of(300, helpful=False), 8, adaptive=True)
    assert settings.share == 0 and settings.gate is None and before == after
    settings, before, after = fit(seen_of(300, helpful=True), 8, adaptive=False)
    assert 0 < settings.share < 1 and after < before


def test_the_best_share_is_the_best_of_a_grid() -> None:
    seen = seen_of(300, helpful=True)
    near = seen.near(4.0)
    share, mean = best_share(seen.nll, near)
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    losses = torch.stack([-(s * near + (1 - s) * (-seen.nll).exp()).log().mean() for s in grid])
    assert abs(share - float(grid[losses.argmin()])) < 2e-3 and mean <= float(losses.min()) + 1e-9


def test_a_fitted_gate_skips_what_is_no_use() -> None:
    seen = seen_of(900, helpful=True)
    constant, _, plain = fit(seen, 8, adaptive=False)
    adaptive, _, after = fit(seen, 8, adaptive=True)
    assert adaptive.gate is not None and after <= plain * 1.005
    shares = torch.sigmoid(((seen.features - torch.tensor(adaptive.gate.mean)) / torch.tensor(adaptive.gate.spread))
                           @ torch.tensor(adaptive.gate.weight, dtype=torch.float64) + adaptive.gate.bias)  # fmt: skip
    assert 0.3 < float((shares < adaptive.gate.threshold).float().mean()) < 1
    assert constant.gate is None


def test_text_that_is_in_the_store_is_known_by_its_runs(tmp_path: Path) -> None:
    store = make_store(tmp_path, 400)
    assert shared_runs(store, store.tokens[13:200]) == 1.0
    assert shared_runs(store, random_tokens(300, seed=8)) == 0.0
    assert shared_runs(store, store.tokens[:5]) == 0.0


@pytest.mark.parametrize("keys", ["int8", "float16"])
def test_rounded_keys_change_probabilities_within_the_stated_bound(tmp_path: Path, keys) -> None:
    """|Δ log p_kNN| ≤ 2ε/T for the same neighbours, ε = 2‖q − k‖·e + e²."""
    full, rounded = make_store(tmp_path / "full", 60), make_store(tmp_path / "rounded", 60, keys=keys)
    queries, temperature = random_keys(9, seed=4), 3.0
    p, q = (
        mixed_log_probs(Retrieval(s, Settings(60, temperature, 1.0)), queries, logits_of(9)) for s in (full, rounded)
    )
    farthest = search(full, queries, 60).distances.amax(1).sqrt()
    bound = 2 * (2 * farthest * rounded.error + rounded.error**2) / temperature
    seen = p > -torch.inf
    assert bool(((p - q).abs().masked_fill(~seen, 0.0).amax(1) <= bound).all())
    assert float((p - q)[seen].abs().max()) > 0
