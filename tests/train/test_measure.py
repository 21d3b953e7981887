"""What a step costs, measured: against the prediction by arithmetic, and without leaving a trace in the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spanformer.cost.model import Shape, full, step_cost
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM
from spanformer.report.events import read_run
from spanformer.train.measure import copy_of, count_flops, measure_cost, one_step, steady_state
from spanformer.train.run import train
from tiny_runs import tiny

B, T, S = 2, 128, 512
CONFIG = ModelConfig(
    vocab=50, dim=64, layers=2, heads=4, attention=AttentionConfig(max_span=S, ramp=16.0),
    feedforward=FeedForwardConfig(dim=96),
)  # fmt: skip
CONFIGS = {
    "plain": CONFIG,
    "grouped": replace(CONFIG, kv_heads=2),
    "experts": replace(CONFIG, feedforward=FeedForwardConfig(dim=64, experts=4)),
    "hybrid": replace(CONFIG, attention=replace(CONFIG.attention, stack=("window:32", "adaptive_span"))),
}


def model(config: ModelConfig) -> LM:
    torch.manual_seed(0)
    lm = LM(config)
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.copy_(torch.linspace(0.05, 0.9, module.kv_heads))
    return lm


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, CONFIG.vocab, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return x[:, :-1], x[:, 1:]


def shape(lm: LM) -> Shape:
    c = lm.config
    weights = lm.blocks[0].feedforward.weights_per_token  # pyright: ignore
    return Shape(c.layers, c.dim, c.heads, c.groups, c.head_dim, weights, c.persistent, c.vocab, T, B, S)


def whole_attention(config: ModelConfig) -> ModelConfig:
    return replace(config, attention=replace(config.attention, kind="full", stack=()))


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_operations_are_the_predicted_ones_and_little_more(name: str) -> None:
    """The prediction is the least; blocks of keys that are partly out of reach are counted whole. Found here: learned
    spans 18 to 21 % above it, full attention 13 to 14 %."""
    lm, (x, y) = model(CONFIGS[name]), batch()
    counted = count_flops(lm, x, y, steady_state(lm, B))
    assert 1.0 <= counted / step_cost(shape(lm), lm.distances(), lm.memory_lengths()).total < 1.25
    whole = copy_of(lm, whole_attention(lm.config))
    counted = count_flops(whole, x, y, steady_state(whole, B))
    assert 1.0 <= counted / step_cost(shape(lm), full(shape(lm))).total < 1.2


@pytest.mark.parametrize("name", ["plain", "grouped", "experts"])
def test_everything_but_attention_is_predicted_exactly(name: str) -> None:
    """Heads that see nothing but their own token remember nothing, and the kernel's own operations are not counted."""
    attention = AttentionConfig(kind="window", window=1, max_span=S, backend="native")
    lm, (x, y) = model(replace(CONFIGS[name], attention=attention)), batch()
    with counted_products(), FlopCounterMode(display=False) as counter:
        one_step(lm, x, y, steady_state(lm, B))
    parts = step_cost(shape(lm), lm.distances(), lm.memory_lengths()).parts()
    assert parts.pop("attention") > 0 and parts["reprojection"] == 0
    assert counter.get_total_flops() == sum(parts.values())


def test_the_model_with_full_attention_is_the_same_otherwise() -> None:
    """With spans at their limit, and a text no longer than that, both see everything."""
    lm, (x, y) = model(CONFIG).double(), batch()
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.fill_(1.0)
    whole = copy_of(lm, whole_attention(CONFIG))
    assert torch.allclose(lm(x, targets=y).nll, whole(x, targets=y).nll, rtol=1e-10)
    assert whole.spans() == [[None] * 4] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_measured(recompute: bool, dtype: str) -> None:
    lm, (x, y) = model(CONFIG), batch()
    lm.checkpointing = recompute
    event = measure_cost(lm, x, y, dtype=dtype)
    assert list(event) == ["flops", "step_seconds", "attention_seconds", "peak_bytes"]
    for name in ("learned", "full"):
        assert 0 < event["attention_seconds"][name] <= event["step_seconds"][name]
        assert event["peak_bytes"].get(name, 1) >= 0
    assert 0 < event["flops"]["learned"] < event["flops"]["full"]


def test_measuring_leaves_no_trace() -> None:
    lm, (x, y) = model(CONFIG).eval(), batch()
    lm(x, targets=y).nll.mean().backward()  # pyright: ignore
    lm.mechanisms()[0].backend = "reference"
    weights = {name: t.clone() for name, t in lm.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    attributes = [dict(m.__dict__) for m in lm.mechanisms()]
    measure_cost(lm, x, y)
    assert not lm.training and [m.backend for m in lm.mechanisms()] == ["reference", "auto"]
    assert [dict(m.__dict__) for m in lm.mechanisms()] == attributes
    assert all(torch.equal(t, weights[name]) for name, t in lm.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in lm.named_parameters() if p.grad is not None)


def test_a_run_ends_with_its_cost(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.measure": True, "train.steps": 3}))
    (cost,) = read_run(tmp_path / "run").costs
    assert cost.step == 3 and 0 < cost.flops["learned"] <= cost.flops["full"]


def test_too_little_memory_to_measure_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanformer.train import run as running

    def measure(*_arguments: object, **_options: object) -> dict:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(running, "measure_cost", measure)
    result = train(tiny(tmp_path, {"train.measure": True, "train.steps": 3}))
    run = read_run(tmp_path / "run")
    assert result.reason == "all steps done" and run.stop is not None and not run.costs
    assert run.notes[-1].text.startswith("what a step costs could not be measured: DefaultCPUAllocator")
