"""Spans learned to a budget: it is kept exactly, windows go where they are needed, and bytes are counted whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.hf_models import tiny, tokens

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.hf.baselines import by_mass, local_global, uniform
from spanformer.hf.fit import FitConfig, budget_of, full_states, learn, set_windows, trial, window_table
from spanformer.hf.fit_events import Trial
from spanformer.hf.survey import default_grid, survey
from spanformer.hf.text import TextChunks, bits_per_byte
from spanformer.model.budget import Budget, Price, allocate

CONTEXT, START, SINKS = 96, 48, 2


def texts(count: int, seed: int = 1) -> TextChunks:
    return TextChunks(tokens(count, CONTEXT, seed=seed), torch.full((count,), 3 * (CONTEXT - START)), START)


@pytest.mark.parametrize("share", [0.06, 0.25, 0.5, 1.0])
def test_whole_windows_keep_the_budget_and_waste_less_than_a_token_a_head(share: float) -> None:
    budget = Budget(share, CONTEXT, SINKS)
    wanted = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) * 90 + 1
    fitted = budget.fit(wanted)
    whole = budget.whole(fitted)
    assert fitted.mean() == pytest.approx(min(budget.tokens - SINKS, CONTEXT - SINKS), rel=1e-4)
    assert whole.min() >= 1 and whole.max() <= CONTEXT - SINKS
    assert share - 1 / CONTEXT < budget.share_of(whole) <= share + 1e-9
    hand = sum(min(w + SINKS, CONTEXT) for row in whole.tolist() for w in row) / (15 * CONTEXT)
    assert budget.share_of(whole) == pytest.approx(hand)


def test_soft_edge_counts_whole() -> None:
    budget = Budget(0.5, CONTEXT, SINKS)
    assert budget.share_of(torch.tensor([[10.2, 200.0]])) == pytest.approx((11 + 2 + 96) / (2 * 96))


def test_bytes_equal_a_hand_count_and_the_cache_s_own() -> None:
    model = hf.attach(tiny("llama"), max_span=CONTEXT, sink_tokens=SINKS)
    windows = torch.tensor([[5, 94], [1, 30], [17, 64]])
    set_windows(model, windows)
    assert window_table(model).tolist() == windows.tolist()
    kept, full = hf.cache_bytes(model, CONTEXT)
    assert kept / full == pytest.approx(Budget(0.5, CONTEXT, SINKS).share_of(windows))
    assert kept / full == pytest.approx((7 + 96 + 3 + 32 + 19 + 66) / (6 * 96))


def test_no_window_is_a_token_longer_by_rounding() -> None:
    """(w − 1) / 3000 · 3000 is not always w − 1 in float32."""
    model = hf.attach(tiny("llama"), max_span=3000, sink_tokens=SINKS)
    for first in range(1, 3000, 6):
        windows = torch.arange(first, first + 6).view(3, 2)
        set_windows(model, windows)
        assert window_table(model).tolist() == windows.tolist()
    with pytest.raises(ValueError, match="a window is 3001 tokens, and max_span 3000; attach longer spans"):
        set_windows(model, torch.full((3, 2), 3001))


def test_hard_window_of_w_hides_the_key_at_distance_w_and_shows_the_one_before() -> None:
    model, ids = hf.attach(tiny("llama"), max_span=CONTEXT, sink_tokens=0), tokens(1, 40)
    set_windows(model, torch.full((3, 2), 5))
    far = ids.clone()
    far[0, 39 - 3 * 4 - 1] += 1  # three layers hand on what is 4 tokens back in each
    near = ids.clone()
    near[0, 39 - 3 * 4] += 1
    with torch.no_grad():
        last, last_far, last_near = (model(x % 97).logits[0, -1] for x in (ids, far, near))
    assert torch.equal(last, last_far) and not torch.equal(last, last_near)


def test_allocation_is_the_cheapest_of_all_choices_on_convex_curves() -> None:
    budget = Budget(0.5, 10, 1)
    grid = [1, 3, 5, 7, 9]
    curves = torch.tensor([[[9.0, 5, 2, 1, 0]], [[4.0, 3, 2, 1, 0]], [[0.5, 0.2, 0.1, 0, 0]]])
    windows, price = allocate(curves, grid, budget)
    assert float(windows.mean()) == pytest.approx(4.0)

    def cost(choice: tuple[float, ...]) -> float:
        return sum(float(np.interp(w, grid, curves[n, 0])) for n, w in enumerate(choice))

    every = range(1, 10)
    cheapest = min(cost((a, b, c)) for a in every for b in every for c in every if a + b + c <= 12)
    assert cost(tuple(windows.flatten().tolist())) == pytest.approx(cheapest)
    assert price == pytest.approx(1 / 2)  # the last token went to a head that gains a half by it


def test_price_is_where_tokens_only_change_hands() -> None:
    price = Price(0.0, memory=0.0)
    slopes = torch.tensor([[-3.0, -1.0], [-2.0, 2.0]])
    assert price.step(slopes) == pytest.approx(1.0)
    assert float((slopes + price.weight).sum()) == pytest.approx(0.0)
    assert price.step(-slopes.abs() * 0 + 1) == 0.0  # heads that want to shrink: no price


def constructed(far: tuple[int, int]):
    """A model in which one key/value head looks evenly at all it sees (its queries are 0) and says it loudly, and what
    all others see hardly counts (their values are all but 0): only that one needs a window."""
    model = tiny("llama")
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            for head in range(2):
                values = layer.self_attn.v_proj.weight[8 * head : 8 * head + 8]
                values *= 6 if (n, head) == far else 0.01
        model.model.layers[far[0]].self_attn.q_proj.weight[16 * far[1] : 16 * far[1] + 16] = 0
    return model


@pytest.mark.parametrize("far", [(0, 1), (2, 0)])
def test_head_that_needs_everything_gets_it(far: tuple[int, int]) -> None:
    model = hf.attach(constructed(far), max_span=CONTEXT, sink_tokens=SINKS)
    model.requires_grad_(False)
    budget = Budget(0.35, CONTEXT, SINKS)
    train, held_out = texts(4), texts(2, seed=2)
    found = survey(model, train, sink_tokens=SINKS, drawings=3)
    assert found.grid == default_grid(CONTEXT - SINKS) and found.costs.shape == (3, 2, len(found.grid))
    events: list[object] = []
    config = FitConfig(steps=12, check=4, ramp=24, last_ramp=8, patience=9)
    windows = learn(model, train, held_out, budget, allocate(found.costs, found.grid, budget), config, events.append)
    assert int(windows[far]) == int(windows.max()) and int(windows[far]) > 2 * float(windows.float().mean())
    assert budget.share_of(windows) <= budget.share
    assert torch.equal(window_table(model), windows)
    trials = [event.kl for event in events if isinstance(event, Trial)]
    assert len(trials) == 4
    even = uniform(3, 2, budget)
    learned = bits_per_byte(model, held_out)
    set_windows(model, budget.longest.expand(3, 2))
    full = bits_per_byte(model, held_out)
    set_windows(model, even)
    assert abs(learned - full) < abs(bits_per_byte(model, held_out) - full)
    assert not any(p.requires_grad for p in model.parameters())


def test_learning_lowers_the_loss_it_starts_from() -> None:
    model = hf.attach(constructed((1, 0)), max_span=CONTEXT, sink_tokens=SINKS)
    model.requires_grad_(False)
    budget, train = Budget(0.3, CONTEXT, SINKS), texts(3)
    found = survey(model, train, sink_tokens=SINKS, drawings=1)
    blind = type(found)(found.grid, torch.ones_like(found.costs), found.lost)  # a survey that says nothing
    kls: list[float] = []
    learn(
        model, train, train, budget, allocate(blind.costs, blind.grid, budget),
        FitConfig(steps=20, check=20, ramp=24, last_ramp=8, lr=0.2),
        lambda event: kls.append(event.kl) if isinstance(event, Trial) else None,
    )  # fmt: skip
    assert kls[-1] < 0.8 * kls[0]


def test_survey_prices_what_a_forward_pass_shows() -> None:
    """The quadratic estimate beside the KL itself, one head cut at a time, where the change is small."""
    model = hf.attach(constructed((1, 0)), max_span=CONTEXT, sink_tokens=SINKS)
    model.requires_grad_(False)
    train = texts(2)
    found = survey(model, train, sink_tokens=SINKS, grid=[64, 80], drawings=64)
    reference = [full_states(model, row, START, CONTEXT) for row in train.ids]
    windows = torch.full((3, 2), CONTEXT - SINKS)
    windows[1, 0] = 80
    real = trial(model, windows, train, reference)
    assert found.costs[1, 0, 1] == pytest.approx(real, rel=0.5)
    # queries at 48 … 94 look evenly: at position i, i + 1 − 80 − 2 of i + 1 keys are outside
    outside = sum(max(0, i + 1 - 80 - SINKS) / (i + 1) for i in range(START - 1, CONTEXT - 1)) / (CONTEXT - START)
    assert float(found.lost[1, 0, 1]) == pytest.approx(outside, rel=1e-3)


def test_layers_with_a_window_of_their_own_are_fitted_within_it() -> None:
    """Gemma 3: windows of 40 tokens but in the middle layer. All heads look evenly; only those of layer 0 matter."""
    model = tiny("gemma3", sliding_window=40)
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.weight *= 0.01
            layer.self_attn.v_proj.weight *= 3 if n == 0 else 0.1
    hf.attach(model, max_span=CONTEXT, sink_tokens=SINKS).requires_grad_(False)
    layers = list(hf.head_spans(model).values())
    budget, train = budget_of(layers, 0.6, CONTEXT, SINKS), texts(2)
    assert budget.own == (40, None, 40) and budget.longest.tolist() == [[40], [94], [40]]
    assert budget.share_of(torch.tensor([[40, 10], [94, 20], [7, 60]])) == pytest.approx(
        (40 + 10 + 96 + 22 + 7 + 40) / (2 * (40 + 96 + 40))
    )
    found = survey(model, train, sink_tokens=SINKS, grid=[16, 32, 48, 64], drawings=64)
    assert (found.costs[[0, 2], :, 2:] == 0).all() and (found.costs[1, :, 2:] > 0).all()
    reference = [full_states(model, row, START, CONTEXT) for row in train.ids]
    windows = budget.longest.expand(3, 2).clone()
    windows[2, 0] = 32
    assert found.costs[2, 0, 1] == pytest.approx(trial(model, windows, train, reference), rel=0.5)
    # a query that looks evenly at 40 tokens loses 8 of them, without sinks
    assert found.lost[2].tolist() == [pytest.approx([0.6, 0.2, 0, 0], abs=0.01)] * 2
    first = allocate(found.costs, found.grid, budget)
    learned = learn(model, train, train, budget, first, FitConfig(steps=4, check=2, ramp=24, last_ramp=8))
    assert 0.58 < budget.share_of(learned) <= 0.6 and (learned <= budget.longest).all()
    assert torch.equal(window_table(model), learned)
    assert float(learned[0].float().mean()) > float(learned[2].float().mean())
    assert uniform(3, 2, budget_of(layers, 0.8, CONTEXT, SINKS)).tolist() == [[40, 40], [59, 58], [40, 40]]
    with pytest.raises(ValueError, match=r"budget is 0.01, 0.6 of 58.6667 tokens a head.*ask for 0.0284 or more"):
        budget_of(layers, 0.01, CONTEXT, SINKS)


def test_baselines_spend_the_same_budget() -> None:
    budget = Budget(1 / 3, 2048, 4)
    lost = torch.rand(30, 3, 4, generator=torch.Generator().manual_seed(0)).sort(-1, descending=True).values
    for windows in (uniform(30, 3, budget), local_global(30, 3, budget), by_mass(lost, [64, 256, 512, 1024], budget)):
        assert 1 / 3 - 1e-3 < budget.share_of(windows) <= 1 / 3 + 1e-9
    assert (local_global(30, 3, budget)[5] == 2044).all() and (local_global(30, 3, budget)[:5] < 500).all()
    with pytest.raises(ValueError, match=r"global layers alone take 0\.167"):
        local_global(30, 3, Budget(1 / 8, 2048, 4))


@pytest.mark.parametrize(
    ("share", "sink_tokens", "message"),
    [
        (0.0, 4, "budget is 0; expected a share"),
        (1.5, 4, "budget is 1.5; expected a share"),
        (0.002, 4, "4 sink tokens and the token itself take 5; ask for 0.0024 or more"),
        (0.5, 2047, "sink_tokens is 2047 of 2048 tokens"),
    ],
)
def test_budget_that_cannot_be_kept_is_refused(share: float, sink_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(share, 2048, sink_tokens)
