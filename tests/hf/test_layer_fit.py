"""Windows by layer with learned sink logits: priced as a dense computation does, within the budget, in the form that
GraniteSWA and GGUF files hold."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.cli.main import main
from spanformer.hf.fit import FitConfig, growth_table, window_table
from spanformer.hf.fit_events import Trial
from spanformer.hf.fit_plan import FitPlan
from spanformer.hf.gguf_export import export_gguf
from spanformer.hf.layer_fit import LayerFit, Pattern, get_sinks, patterns, set_sinks
from spanformer.hf.layer_survey import BESIDE, LayerCosts, LayerPrices, block_squares, logits_to_try
from spanformer.hf.plan import FitRun
from spanformer.hf.saved import load_fitted
from spanformer.hf.spans import NO_SINK
from spanformer.hf.survey import survey
from spanformer.hf.text import TextChunks, load_model
from spanformer.model.budget import Budget
from support.byte_llama import PROSE
from support.gguf_models import save_gguf, unpacked
from support.hf_models import tiny, tokens, transformers

CONTEXT = 96


def texts(count: int, seed: int = 1, start: int = 1) -> TextChunks:
    return TextChunks(tokens(count, CONTEXT, seed=seed), torch.full((count,), 3 * (CONTEXT - start)), start)


def dense_out(q: Tensor, k: Tensor, v: Tensor, window: int, logits: Tensor | None) -> Tensor:
    """[H, T, D] in float64, with a sink logit [H] in every softmax."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    q, k, v = q[0].double(), k[0].double().repeat_interleave(group, 0), v[0].double().repeat_interleave(group, 0)
    d = torch.arange(length)[:, None] - torch.arange(length)[None]
    score = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill((d < 0) | (d >= window), -math.inf)
    if logits is None:
        return score.softmax(-1) @ v
    sink = logits.double()[:, None, None].expand(-1, length, 1)
    return torch.cat([score, sink], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("length", [63, 64, 130])
def test_prices_are_those_of_dense_attention(length: int) -> None:
    make = torch.Generator().manual_seed(length)
    grid, heads = [1, 7, 62], 4
    prices, total, tried = LayerPrices(grid), torch.zeros(heads, 3, len(BESIDE), dtype=torch.float64), None
    for _ in range(2):  # two texts; the first decides what is tried
        q = torch.randn(1, heads, length, 8, generator=make)
        k, v = (torch.randn(1, 2, length, 8, generator=make) for _ in range(2))
        grads = [torch.randn(1, heads, length, 8, generator=make) for _ in range(3)]
        full = dense_out(q, k, v, length, None)
        score = (q[0].double() @ k[0].double().repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(8)).masked_fill(
            torch.ones(length, length).triu(1).bool(), -math.inf
        )
        prices.add(0, q, k, v, None, full[None].float(), score.logsumexp(-1)[None].float(), grads)
        if tried is None:
            tried = prices.tried[0]
            for n, window in enumerate(grid):  # the weight of keys beyond the window, of queries that have some
                hidden = score.tril(-window).masked_fill(torch.ones(length, length).triu(1 - window).bool(), -math.inf)
                middle = hidden.logsumexp(-1)[:, window:].median(1).values
                assert torch.allclose(tried[:, n, BESIDE.index(0.0)].double(), middle, atol=1e-4)
        for (n, window), s in itertools.product(enumerate(grid), range(len(BESIDE))):
            change = dense_out(q, k, v, window, tried[:, n, s]) - full
            for g in grads:
                moved = (g[0].double() * change).sum(-1)
                blocks = [moved[:, at : at + 64].sum(1) ** 2 for at in range(0, length, 64)]
                total[:, n, s] += sum(blocks) / (2 * len(grads))
    found = prices.costs(10)
    least = total.min(-1)
    assert torch.allclose(found.costs[0].double(), least.values.sum(0) / 10, rtol=1e-4)
    assert tried is not None
    assert torch.allclose(found.sink_logits[0], tried.gather(-1, least.indices[..., None])[..., 0])


def test_sink_logits_are_sought_beside_the_weight_that_a_window_hides() -> None:
    beyond = torch.tensor([[-math.inf, 1.0, 3.0], [2.0, 2.0, 2.0]])
    assert logits_to_try(beyond)[:, BESIDE.index(0.0)].tolist() == [1.0, 2.0]
    assert (logits_to_try(beyond[:, :0]) == NO_SINK).all()  # a window that hides nothing
    assert block_squares(torch.ones(2, 65)).tolist() == [64.0**2 + 1] * 2


def test_patterns_are_the_cheapest_of_all_within_the_budget() -> None:
    make = torch.Generator().manual_seed(0)
    grid, layers = [4, 16, 40], 5
    costs = torch.rand(layers, 3, generator=make).sort(-1, descending=True).values
    found = LayerCosts(costs, torch.rand(layers, 2, 3, generator=make))
    for share in (0.02, 0.3, 0.45, 0.9):
        budget = Budget(share, CONTEXT, 0)
        some = patterns(found, grid, budget)
        assert [each.cost for each in some] == sorted(each.cost for each in some)
        left = [share * CONTEXT * layers - CONTEXT * (layers - n) for n in range(layers + 1)]
        assert {sum(each.local) for each in some} == {n for n in range(1, layers + 1) if left[n] >= n}
        for each in some:
            windows = each.windows(CONTEXT, 2)
            assert share - len(some) / CONTEXT < budget.share_of(windows) <= share
            assert torch.equal(windows[:, 0] == CONTEXT, each.growth(2)[:, 0] == 1) or each.window == CONTEXT
            assert ((each.sink_logits == NO_SINK).all(1) == ~torch.tensor(each.local)).all()
            places, zero = [*grid, CONTEXT], torch.zeros(layers, 1)
            right = next((n for n, w in enumerate(places) if w >= each.window), 3)
            curve = torch.cat([costs, zero], 1)
            if each.window <= grid[0]:
                at = curve[:, 0]
            else:
                part = (each.window - places[right - 1]) / (places[right] - places[right - 1])
                at = curve[:, right - 1] * (1 - part) + curve[:, right] * part
            cheapest = min(float(at[list(some_local)].sum()) for some_local in
                           itertools.combinations(range(layers), sum(each.local)))  # fmt: skip
            assert each.cost == pytest.approx(cheapest, rel=1e-5)


def needs_layer(far: int):
    """A model whose heads in one layer look evenly at all they see and say it loudly; what others see hardly counts."""
    model = tiny("llama")
    with torch.no_grad():
        for n, layer in enumerate(model.model.layers):
            layer.self_attn.v_proj.weight *= 6 if n == far else 0.01
            layer.self_attn.q_proj.weight *= 0 if n == far else 1
    hf.attach(model, max_span=CONTEXT, sink_tokens=0, sink_logits=True)
    return model.requires_grad_(False)


@pytest.mark.parametrize("far", [0, 2])
def test_layer_that_needs_everything_gets_it(far: int) -> None:
    model, budget, train = needs_layer(far), Budget(0.5, CONTEXT, 0), texts(3)
    found = survey(model, train, sink_tokens=2, layers=True, drawings=2)
    assert found.layered is not None and found.layered.costs.shape == (3, len(found.grid))
    fit = LayerFit(model, train, texts(2, seed=2), FitConfig(steps=0), lambda _: None)
    pattern = fit.learn(patterns(found.layered, found.grid, budget))
    assert torch.equal(get_sinks(fit.layers), pattern.sink_logits)
    assert pattern.local == tuple(n != far for n in range(3)) and pattern.window == int((1.5 - 1) * CONTEXT / 2)
    assert torch.equal(window_table(model), pattern.windows(CONTEXT, 2))


def test_sink_logits_learn_and_only_in_layers_with_the_window() -> None:
    model, train = needs_layer(1), texts(2)
    events: list[float] = []
    config = FitConfig(steps=12, check=4, lr=1.0, patience=9)
    fit = LayerFit(model, train, train, config, lambda e: events.append(e.kl) if isinstance(e, Trial) else None)
    poor = torch.full((3, 4), 4.0)  # takes most of the weight
    poor[2] = NO_SINK
    learned = fit.learn([Pattern(20, (True, True, False), 0.0, poor)])
    without = fit.trial(learned, torch.full((3, 4), NO_SINK))
    assert events[-1] < 0.6 * events[0] and events[-1] < without and len(events) == 4
    assert (learned.sink_logits[2] == NO_SINK).all() and (learned.sink_logits[:2] != 4).all()
    assert fit.trial(learned, learned.sink_logits) == pytest.approx(min(events))
    assert not any(p.requires_grad for p in model.parameters())


def test_slopes_of_sink_logits_are_the_derivatives() -> None:
    model, train = needs_layer(1), texts(1)
    fit = LayerFit(model, train, train, FitConfig(), lambda _: None)
    logits = torch.zeros(3, 4)
    pattern = Pattern(20, (True, True, True), 0.0, logits)
    fit.trial(pattern, logits)
    spans = fit.layers[1]
    assert spans.sink_logits is not None
    adam = torch.optim.SGD([spans.sink_logits], lr=0.0)
    kept: list[Tensor] = []
    adam.zero_grad = lambda *_: kept.append(spans.sink_logits.grad.clone())  # type: ignore[method-assign, union-attr]
    fit._step(adam, [spans.sink_logits], 0, fit.reference[0], 0.0)  # type: ignore[arg-type]
    step, more = 0.05, []
    for sign in (1, -1):
        moved = logits.clone()
        moved[1, 2] += sign * step
        more.append(fit.trial(pattern, moved))
    assert kept[0][2] == pytest.approx((more[0] - more[1]) / (2 * step), rel=0.02)


def test_command_fits_what_granite_and_gguf_hold(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "fit"
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--budget", "0.7",
          "--context", "64", "--steps", "2", "--survey", "1", "--measure", "1", "--dtype", "float32",
          "--per", "layer", "--no-baselines"])  # fmt: skip
    shown = capsys.readouterr().out
    assert "layers have a window of" in shown and "the others see all; learned sink logits" in shown
    assert "windows by head, as surveyed" in shown and "the beginning of the texts, before that:" in shown
    saved = json.loads((out / "spans.json").read_text())
    assert saved["form"] in shown and saved["sink_tokens"] == 0 and 0.68 < saved["share"] <= 0.7
    assert all(len(set(row)) == 1 for row in saved["windows"])
    model, tokenizer, fitted = load_fitted(str(out))
    assert fitted and window_table(model).tolist() == saved["windows"]
    ids = torch.tensor([tokenizer(PROSE)["input_ids"][:90]])
    with torch.no_grad():
        want = model(ids).logits
        granite, windows = hf.to_granite(model, context=64)
        assert (granite(ids).logits - want).abs().max() < 1e-5 * want.abs().max()
        cached = model(ids[:, 60:], past_key_values=_read(model, ids[:, :60])).logits
    assert (cached - want[:, 60:]).abs().max() < 1e-5 * want.abs().max()
    save_gguf(load_model(str(folder))[0], tmp_path / "model.gguf", "F32")
    found = export_gguf(tmp_path / "model.gguf", out, tmp_path / "out.gguf")
    held = unpacked(tmp_path / "out.gguf")
    assert found.windows.layer_types == windows.layer_types
    for n, spans in enumerate(hf.head_spans(model).values()):
        assert spans.sink_logits is not None
        assert torch.equal(held[f"blk.{n}.attn_sinks.weight"], spans.sink_logits.detach())
    assert (growth_table(model) == 1).all(1).tolist() == [kind == "full_attention" for kind in windows.layer_types]


def _read(model, ids: Tensor):
    cache = hf.SpanCache(model)
    model(ids, past_key_values=cache)
    return cache


def test_export_windows_writes_a_granite(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = FitPlan(budget=0.7, context=64, steps=0, survey=1, measure=1, baselines=False, per="layer")
    run = FitRun(str(folder), str(folder / "prose.txt"), "", plan, torch.float32)
    run.save(tmp_path / "fit", run.fit())
    main(["export-windows", str(tmp_path / "fit"), "--data", str(folder / "prose.txt"), "--texts", "1",
          "--form", "granite", "--out", str(tmp_path / "granite")])  # fmt: skip
    assert "+0.00 %" in capsys.readouterr().out.splitlines()[-2]  # windows beside spans
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "granite")
    assert model.config.model_type == "granite_swa"
    with pytest.raises(SystemExit):
        main(["export-windows", str(tmp_path / "fit"), "--data", str(folder / "prose.txt"), "--texts", "1",
              "--out", str(tmp_path / "plain")])  # fmt: skip
    assert "has learned sink logits, which only the form of GraniteSWA holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, said",
    [
        ({"per": "token"}, "per is 'token'; expected 'head' or 'layer'"),
        ({"lora": 4}, "lora is 4 beside per 'layer'; other engines hold only windows and sink logits: leave lora out"),
        ({"far": "linear"}, "far is linear beside per 'layer'"),
        ({"retrieve": 0.1}, r"retrieve is 0\.1 beside per 'layer'"),
        ({"context": 8192}, "context is 8,192 beside per 'layer' and texts of 2,048 tokens; .* give --text 8192"),
        ({"budget": 1.0}, "budget is 1 beside per 'layer'; expected less than 1, so that layers have windows"),
        ({"budget": 0.0001}, r"budget is 0\.0001, 0\.2 of 2048 tokens a head"),
    ],
)
def test_plans_that_no_engine_holds(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FitPlan(**({"per": "layer"} | options))


def test_models_with_windows_of_their_own(tmp_path: Path, folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny("mistral", vocab_size=256).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MistralForCausalLM has layers with a sliding window of their own, and"):
        FitRun(str(tmp_path), str(folder / "prose.txt"), "", FitPlan(context=64, per="layer"), torch.float32)


def test_sinks_are_off_for_the_full_model() -> None:
    model = needs_layer(1)
    layers = list(hf.head_spans(model).values())
    ids = tokens(1, 40)
    with torch.no_grad():
        want = model(ids).logits
        set_sinks(layers, torch.ones(3, 4))
        assert (model(ids).logits - want).abs().max() > 0.01
        set_sinks(layers, None)
        assert torch.equal(model(ids).logits, want)
