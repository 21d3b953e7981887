"""Allocation of windows, rings and codes: by arithmetic, on synthetic heads, and prices of rings on a small model."""

from __future__ import annotations

import pytest
import torch

from spanformer import hf
from spanformer.hf.fit import FitConfig, learn
from spanformer.hf.retrieval_fit import (
    CODE,
    allocate_retrieval,
    beside_retrieval,
    ram_tokens,
    ring_tokens,
    rings_within,
)  # fmt: skip
from spanformer.hf.survey import Survey, survey
from spanformer.hf.text import TextChunks
from spanformer.model.budget import Budget
from support.hf_models import tiny, tokens

GRID, RINGS = [16, 64, 256, 1024], [32, 128]


def synthetic(layers: int = 3, heads: int = 4, seed: int = 0) -> Survey:
    g = torch.Generator().manual_seed(seed)
    costs = torch.rand(layers, heads, 4, generator=g).sort(2, True)[0]
    retrieved = torch.rand(layers, heads, 2, generator=g).sort(2, True)[0] * costs[..., 1:2]
    return Survey(GRID, costs, torch.zeros_like(costs), RINGS, retrieved)


@pytest.mark.parametrize("code", [CODE, 0.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("kept", [0.15, 0.3, 0.7])
def test_allocation_stays_within_its_budget(code: float, share: float, kept: float) -> None:
    for seed in range(5):
        budget, found = Budget(kept, 2048, 4), synthetic(seed=seed)
        made = allocate_retrieval(found, share, budget, code=code)
        by_hand = sum(
            4 + (made.ring + code * (2044 - made.ring) if chosen else window)
            for window, chosen in zip(made.windows.flatten().tolist(), made.chosen.flatten().tolist(), strict=True)
        )
        assert by_hand <= kept * 2048 * 12 + 1e-6
        assert float(ram_tokens(made.windows, made, budget, code=code).sum()) == pytest.approx(by_hand)
        assert 1 <= int(made.chosen.sum()) <= max(1, share * 12)
        assert bool(((made.windows == 2044) == made.chosen).all())  # so that `retrieve` chooses these


def test_a_sparse_far_head_retrieves_and_a_local_one_has_a_window() -> None:
    """Local: nothing beyond 16 tokens matters. Far and sparse: no window short of the context helps, a search does. Far
    and spread: windows help by their length, a search does not."""
    local, sparse, spread = [0.01, 0.0, 0.0, 0.0], [1.0, 0.99, 0.98, 0.9], [0.9, 0.6, 0.2, 0.05]
    costs = torch.tensor([[local, sparse, spread]])
    retrieved = torch.tensor([[[0.01, 0.01], [0.02, 0.01], [0.85, 0.8]]])
    found = Survey(GRID, costs, torch.zeros_like(costs), RINGS, retrieved)
    made = allocate_retrieval(found, 1.0, Budget(0.4, 2048, 4))
    assert made.chosen.tolist() == [[False, True, False]]
    assert made.windows[0, 0] <= 64 < 1024 < made.windows[0, 2]


def test_all_heads_retrieve_with_the_longest_ring_that_fits() -> None:
    costs = torch.ones(2, 3, 4)
    found = Survey(GRID, costs, torch.zeros_like(costs), RINGS, torch.full((2, 3, 2), 0.1))
    made = allocate_retrieval(found, 1.0, Budget(0.1255, 2048, 4), code=0.0)
    assert bool(made.chosen.all()) and made.ring == int(0.1255 * 2048) - 4
    with pytest.raises(ValueError, match="the survey has no prices of retrieving heads; survey the model with rings"):
        allocate_retrieval(Survey(GRID, costs, costs), 1.0, Budget(0.2, 2048, 4))
    with pytest.raises(
        ValueError, match=r"a head with a ring of 32 tokens and its codes takes 1038 tokens of an 8-bit"
    ):
        allocate_retrieval(found, 1.0, Budget(0.05, 2048, 4))
    with pytest.raises(ValueError, match="retrieve is 2; expected a share of the KV heads, above 0 and at most 1"):
        allocate_retrieval(found, 2.0, Budget(0.2, 2048, 4))


def test_more_budget_and_cheaper_codes_never_cost_more() -> None:
    found = synthetic(seed=3)
    costs = [allocate_retrieval(found, 1.0, Budget(kept, 2048, 4)).cost for kept in (0.15, 0.3, 0.5, 0.8)]
    assert costs == sorted(costs, reverse=True) and costs[-1] < costs[0]
    mapped = allocate_retrieval(found, 1.0, Budget(0.3, 2048, 4), code=0.0)
    assert mapped.cost < allocate_retrieval(found, 1.0, Budget(0.3, 2048, 4)).cost
    assert ring_tokens(32, Budget(0.3, 2048, 4), 0.0) == 32


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_learned_windows_beside_retrieving_heads_stay_within_the_budget(share: float) -> None:
    """Learning moves the windows of the others, leaves the retrieving heads whole, and spends no more RAM."""
    model = hf.attach(tiny("llama"), max_span=64, sink_tokens=2).requires_grad_(False)
    texts = TextChunks(tokens(3, 64), torch.tensor([32, 32, 32]), 32)
    budget = Budget(0.5, 64, 2)
    found = survey(model, texts[:1], sink_tokens=2, grid=[8, 16, 32], rings=[8], k=4, drawings=1)
    made = allocate_retrieval(found, share, budget, code=0.0)
    goal = beside_retrieval(budget, made)
    learned = learn(model, texts[:2], texts[2:], goal, (made.windows, made.price), FitConfig(4, check=1, patience=9))
    assert torch.equal(learned == 62, made.chosen) and bool(made.chosen.any())
    held = ram_tokens(learned, made, budget, code=0.0)
    assert float(held.sum()) <= 0.5 * 64 * learned.numel() + 1e-6
    soft = goal.fit(torch.rand(learned.shape) * 60 + 1, spare=4.0)
    for windows in (soft, goal.whole(goal.fit(soft))):
        rest = (windows[~made.chosen].clamp(max=62) + 2).float()
        assert bool((windows[made.chosen] >= 62).all())
        assert made.others is None or float(rest.mean()) <= made.others.tokens + 1e-3


def test_survey_prices_rings_between_windows_and_full_attention() -> None:
    """A ring that finds every older key loses nothing; one that finds the best 8 loses less than a window, in all."""
    model = hf.attach(tiny("llama"), max_span=64, ramp=4, sink_tokens=2)
    texts = TextChunks(tokens(2, 64), torch.tensor([32, 32]), 32)
    options = {"sink_tokens": 2, "grid": [8, 16], "rings": [8, 16], "drawings": 2}
    everything, some = (survey(model, texts, k=k, **options) for k in (64, 8))
    assert everything.retrieved is not None and some.retrieved is not None
    assert float(everything.retrieved.max()) < 1e-6 * float(everything.costs.max())
    assert some.retrieved.shape == some.costs.shape and bool((some.retrieved > 0).all())
    assert float(some.retrieved.sum()) < float(some.costs.sum())
    assert torch.equal(everything.costs, some.costs)  # windows are priced as before
    assert survey(model, texts, sink_tokens=2, grid=[8]).retrieved is None


def test_rings_leave_something_to_search() -> None:
    assert rings_within(2048, 4) == [32, 64, 128, 256] and rings_within(128, 4) == [32] and rings_within(16, 4) == [1]
