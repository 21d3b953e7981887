"""Linear states in a fit: counted in the budget, kept where they pay, learned, saved and loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.hf_models import tiny, tokens

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.cli.main import main
from spanformer.hf.far_learner import costs_at, start_states, states_in_tokens, states_off
from spanformer.hf.fit import FitConfig, learn, set_windows, window_table
from spanformer.hf.fit_events import Trial
from spanformer.hf.plan import FitPlan
from spanformer.hf.saved import load_fitted
from spanformer.hf.spans import state_bytes
from spanformer.hf.survey import Survey, survey
from spanformer.hf.text import TextChunks
from spanformer.hf.transfer import TransferConfig, errors_left, read_samples, set_mass, transfer
from spanformer.model.budget import Budget, allocate
from support.byte_llama import save_byte_llama

CONTEXT, START, SINKS = 96, 48, 2


def texts(count: int, seed: int = 1) -> TextChunks:
    return TextChunks(tokens(count, CONTEXT, seed=seed), torch.full((count,), 3 * (CONTEXT - START)), START)


def even_model():
    """A Llama whose heads look almost evenly at all they see, so that far values matter, and a state can hold them."""
    model = tiny("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.2
            layer.self_attn.v_proj.weight *= 3
    return hf.attach(model, max_span=CONTEXT, sink_tokens=SINKS, far_features=4).requires_grad_(False)


@pytest.mark.parametrize("states", [0.0, 3.25])
def test_windows_leave_room_for_states(states: float) -> None:
    budget = Budget(0.25, CONTEXT, SINKS, states=states)
    wanted = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) * 60 + 1
    whole = budget.whole(budget.fit(wanted))
    hand = (float((whole + SINKS).sum()) + 15 * states) / (15 * CONTEXT)
    assert budget.share_of(whole) == pytest.approx(hand)
    assert 0.25 - 1 / CONTEXT < hand <= 0.25 + 1e-9
    costs = torch.rand(5, 3, 3, generator=torch.Generator().manual_seed(1)).sort(-1, descending=True).values
    assert float(allocate(costs, [4, 16, 64], budget)[0].mean()) == pytest.approx(24 - SINKS - states, rel=1e-4)
    with pytest.raises(ValueError, match=r"token itself, with its state, take 23; .* 0.2396 .* or far features"):
        Budget(0.2, CONTEXT, SINKS, states=20.0)


def test_states_in_tokens_are_their_bytes() -> None:
    model = even_model()
    layers = list(hf.head_spans(model).values())
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert states_in_tokens(layers, dtype) == 4 * 9 * 4 / (16 * size)
    set_windows(model, torch.full((3, 2), 7))
    kept, full = hf.cache_bytes(model, CONTEXT)
    budget = Budget(0.5, CONTEXT, SINKS, states=states_in_tokens(layers, torch.float32))
    assert kept / full == pytest.approx(budget.share_of(torch.full((3, 2), 7)))
    with states_off(layers):
        assert state_bytes(model) == 0
    assert state_bytes(model) == 6 * 4 * 9 * 4


def test_mass_begins_at_that_of_the_full_model() -> None:
    model = even_model()
    set_windows(model, torch.full((3, 2), 9))
    for sample in read_samples(model, tokens(1, CONTEXT)[0]):
        set_mass(sample.spans.far, sample)
    row = tokens(1, CONTEXT)[0]
    for sample in read_samples(model, row):
        far = sample.spans.far
        lost = 1 - (sample.cut.lse - sample.full.lse).exp()[0]
        before = float(far.mass_bias[0])
        far.mass_bias.add_(3.0)
        set_mass(far, sample)
        assert float(far.mass_bias[0]) == pytest.approx(before, abs=1e-3)
        assert float(lost[:, -1].min()) > 0.5


def test_transfer_lowers_the_error_on_other_texts() -> None:
    model = even_model()
    set_windows(model, torch.full((3, 2), 9))
    transfer(model, texts(4), TransferConfig(rounds=2, steps=5))
    left = errors_left(model, texts(2, seed=5))
    assert left.shape == (3, 2) and float(left.max()) < 0.8
    assert not any(p.requires_grad for p in model.parameters())


def test_states_stay_only_where_they_pay() -> None:
    model, budget = even_model(), Budget(0.3, CONTEXT, SINKS)
    train = texts(3)
    found = survey(model, train, sink_tokens=SINKS, drawings=2)
    free = Survey(found.grid, found.costs.clone(), found.lost)
    free.costs[1] = 0  # windows of layer 1 cost nothing, so a state saves nothing
    less, scaled = start_states(model, train, texts(2, seed=7), budget, free, TransferConfig(2, 4), torch.float32)
    layers = list(hf.head_spans(model).values())
    on = [layer.far.kv_on() for layer in layers]
    assert on[1] == [] and (on[0] or on[2])
    assert less.states == states_in_tokens(layers, torch.float32) > 0
    cheaper = scaled.costs / free.costs.clamp(min=1e-12)
    assert all(float(cheaper[n, g].max()) < 1 for n in (0, 2) for g in on[n])
    assert costs_at(found, torch.full((3, 2), float(found.grid[2]))).equal(found.costs[..., 2].float())


def test_a_fit_with_states_loses_less_than_windows_of_the_same_bytes() -> None:
    model, budget, train, others = even_model(), Budget(0.3, CONTEXT, SINKS), texts(4), texts(2, seed=2)
    layers = list(hf.head_spans(model).values())
    found = survey(model, train, sink_tokens=SINKS, drawings=2)
    config = FitConfig(steps=12, check=4, ramp=24, last_ramp=8, patience=9)
    kls: dict[str, list[float]] = {"windows": [], "states": []}
    with states_off(layers):
        learn(model, train, others, budget, allocate(found.costs, found.grid, budget), config, _kept(kls["windows"]))
    less, costs = start_states(model, train, others, budget, found, TransferConfig(2, 5), torch.float32)
    windows = learn(model, train, others, less, allocate(costs.costs, costs.grid, less), config, _kept(kls["states"]))
    assert min(kls["states"]) < 0.7 * min(kls["windows"])
    kept, full = hf.cache_bytes(model, CONTEXT)
    assert kept / full == pytest.approx(less.share_of(windows)) and 0.28 < kept / full <= 0.3
    assert torch.equal(window_table(model), windows)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def _kept(kls: list[float]):
    return lambda event: kls.append(event.kl) if isinstance(event, Trial) else None


# ---- saved and loaded


def stirred():
    model = even_model()
    torch.manual_seed(5)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.uniform_(0, 0.4)
            for p in spans.far.parameters():
                p.add_(0.3 * torch.randn_like(p))
            spans.far.on[0] = False
    return model


def test_a_round_trip_with_states(tmp_path: Path) -> None:
    model, ids = stirred(), tokens(2, 80)
    model.save_pretrained(tmp_path)
    again = hf.from_pretrained(tmp_path).eval()
    assert again.config.spanformer == model.config.spanformer and state_bytes(again) == state_bytes(model) > 0
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    small = hf.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(layer.far.key_weight.dtype == torch.float32 for layer in hf.head_spans(small).values())
    with pytest.raises(ValueError, match=r"has linear states beyond its spans.*--far none"):
        hf.to_windows(model, context=80)


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    stirred().save_pretrained(tmp_path)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights, config = load_file(file), json.loads(settings.read_text())
    begin = "model.layers.1.self_attn.spans.far."
    for name, wrong, said in (
        ("query_bias", torch.zeros(4, 5), r"query_bias in .* is \[4, 5\] of torch.float32; expected finite"),
        ("mass_bias", torch.full((4,), torch.nan), r"mass_bias in .* expected finite numbers \[4\] of torch.float32"),
        ("on", torch.ones(2), None),
        (
            "key_weight",
            torch.zeros(2, 9, 8),
            r'"far_features" in .* is 4, and the weights hold linear states of \[4, 9\]',
        ),
    ):
        save_file(weights | {begin + name: wrong}, file, {"format": "pt"})
        if said is None:
            hf.from_pretrained(tmp_path)  # numbers for yes and no
            continue
        with pytest.raises(ValueError, match=said):
            hf.from_pretrained(tmp_path)
    save_file({k: t for k, t in weights.items() if k != begin + "on"}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"far.on in .* is missing; expected"):
        hf.from_pretrained(tmp_path)
    save_file(weights, file, {"format": "pt"})
    for wrong, said in ((10**12, "is 1000000000000, and the weights hold"), ("4", "expected max_span, ramp, per")):
        settings.write_text(json.dumps(config | {"spanformer": config["spanformer"] | {"far_features": wrong}}))
        with pytest.raises(ValueError, match=said):
            hf.from_pretrained(tmp_path)


def test_fit_spans_with_states_from_text_to_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, out = tmp_path / "model", tmp_path / "fit"
    save_byte_llama(folder, 256)
    prose = "The river stood behind the market, and nobody had ever seen it so quiet. Über alles ein Wort — 1234.\n"
    (folder / "prose.txt").write_text(prose * 40)
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--budget", "0.4",
          "--context", "64", "--steps", "2", "--survey", "2", "--measure", "2", "--dtype", "float32",
          "--far", "linear", "--far-features", "2"])  # fmt: skip
    shown, saved = capsys.readouterr().out, json.loads((out / "spans.json").read_text())
    model, _, fitted = load_fitted(str(out))
    assert fitted and window_table(model).tolist() == saved["windows"]
    assert saved["state_bytes"] == state_bytes(model)
    kept, full = hf.cache_bytes(model, 64)
    assert kept / full == pytest.approx(saved["share"]) and 0.36 < saved["share"] <= 0.4
    heads = sum(map(len, saved["states"]))
    assert heads and f"{heads} KV heads have a linear state" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"far": "cubic"}, "far is 'cubic'; expected 'none' or 'linear'"),
        ({"far": "linear", "far_features": 0}, "far_features is 0; expected at least 1"),
        ({"far": "linear", "lora": 8}, "lora is 8 beside far 'linear'; linear states are fitted to a budget"),
        ({"far": "linear", "tolerance": 0.01}, "tolerance is 0.01 beside far 'linear'"),
    ],
)
def test_plans_that_cannot_be_fitted(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FitPlan(), **options)


def test_states_need_a_layer_without_a_window() -> None:
    with pytest.raises(
        ValueError, match=r"far_features is 4, and every layer of MistralForCausalLM has its own sliding"
    ):
        hf.attach(tiny("mistral"), far_features=4)
