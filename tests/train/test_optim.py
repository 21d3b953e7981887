"""Optimisers against plain loops of their rules, the learning rate step by step, and which parameter goes where."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from spanformer.train import optim
from spanformer.train.optim import ClippedAdagrad, OptimConfig, clip_global, lr_at, make_optimizer, set_lr

SHAPES = [(), (1,), (63,), (7, 9), (111, 5), (2, 3, 4), (0, 3), (129, 130)]


def make(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Some far above a clip of 0.5, some below, and one of nothing but zeros."""
    torch.manual_seed(100 + step)
    grads = [torch.randn(shape, dtype=torch.float64) * 10.0 ** (i % 4 - 3) for i, shape in enumerate(SHAPES)]
    grads[3] *= step > 0
    return [grad.to(dtype) for grad in grads]


def adagrad_by_the_rule(
    params: list[Tensor], lr: float, clip: float, decay: float, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """The slow, obvious one, one tensor after the other."""
    params = [p.detach().clone() for p in params]
    sums = [torch.zeros_like(p) for p in params]
    for step in range(steps):
        for p, s, g in zip(params, sums, gradients(step, dtype), strict=True):
            g = g.to(p.dtype) + decay * p
            norm = math.sqrt(float((g.double() ** 2).sum()))
            rate = lr * clip / (norm + 1e-10) if clip and norm > clip else lr
            s += g * g
            p -= rate * g / (s.sqrt() + 1e-10)
    return params


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        for p, g in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


@pytest.fixture(params=["one pass on the cpu", "lists of tensors"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of updating; the second is that of other devices and of distributed tensors."""
    if request.param == "lists of tensors":
        monkeypatch.setattr(optim, "_is_plain_cpu", lambda _: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("clip", "decay"), [(0.5, 0.0), (0.0, 0.0), (0.5, 0.1), (1e6, 0.0)])
def test_clipped_adagrad_follows_its_rule(way: str, dtype: torch.dtype, clip: float, decay: float) -> None:
    params = make(dtype)
    truth = adagrad_by_the_rule([p.double() for p in params], 0.07, clip, decay, 6, dtype)
    plain = adagrad_by_the_rule([p.detach() for p in params], 0.07, clip, decay, 6, dtype)
    run(ClippedAdagrad(params, lr=0.07, clip=clip, weight_decay=decay), params, 6)
    unit = torch.finfo(dtype).eps
    for got, true, same_dtype in zip(params, truth, plain, strict=True):
        allowed = 2 * (same_dtype.double() - true).abs() + 6 * unit * (true.abs() + 0.07)
        assert ((got.double() - true).abs() <= allowed).all()


def test_adagrad_accumulates_unclipped_gradients() -> None:
    """Were the accumulator fed clipped gradients, a first step would be ±lr whatever the clip."""
    params = make(torch.float64)
    before = [p.detach().clone() for p in params]
    run(ClippedAdagrad(params, lr=0.07, clip=0.5), params, 1)
    for p, old, grad in zip(params, before, gradients(0, torch.float64), strict=True):
        shorter = min(1.0, 0.5 / max(float(grad.norm()), 1e-30))
        torch.testing.assert_close(p.detach(), old - 0.07 * shorter * grad.sign(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_without_a_clip_it_is_torchs_adagrad(way: str, decay: float) -> None:
    ours, theirs = make(torch.float32), make(torch.float32)
    run(ClippedAdagrad(ours, lr=0.05, clip=0, weight_decay=decay), ours, 5)
    fast = {"fused": True} if way == "one pass on the cpu" else {"foreach": True}
    run(Adagrad(theirs, lr=0.05, weight_decay=decay, eps=1e-10, **fast), theirs, 5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if not decay else 1e-6, atol=0 if not decay else 1e-7)


def test_adagrad_takes_strided_parameters_and_leaves_gradients_alone() -> None:
    base = torch.randn(6, 4)
    turned, straight = nn.Parameter(base.clone().T), nn.Parameter(base.T.clone(memory_format=torch.contiguous_format))
    grad = torch.randn(4, 6)
    for p in (turned, straight):
        p.grad = grad.clone()
        ClippedAdagrad([p], lr=0.1, clip=0.5).step()
        assert torch.equal(p.grad, grad)
    assert not turned.is_contiguous()
    torch.testing.assert_close(turned, straight)


def test_adagrad_without_gradients_and_with_a_closure() -> None:
    p, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = ClippedAdagrad([{"params": [p, idle]}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1, clip=9)

    def closure() -> float:
        loss = (p * 2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6
    assert torch.equal(idle, torch.ones(2)) and idle not in optimizer.state
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.norm = nn.Embedding(5, 4), nn.Linear(4, 5), nn.LayerNorm(4)
        self.ratio, self.table = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 3, 4))
        self.span_vectors = nn.Parameter(torch.zeros(2, 4))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


@pytest.mark.parametrize(("kind", "expected"), [("adamw", AdamW), ("sgd", SGD), ("adagrad", ClippedAdagrad)])
@pytest.mark.parametrize("span_lr", [0.0, 0.5])
def test_groups(kind, expected: type, span_lr: float) -> None:
    net = Net()
    config = OptimConfig(kind=kind, lr=0.2, span_lr=span_lr, momentum=0.7, betas=(0.5, 0.6), weight_decay=0.3, clip=0.4)
    optimizer = make_optimizer(net.named_parameters(), config, lambda name: name in ("ratio", "span_vectors"))
    assert type(optimizer) is expected
    name_of = {parameter: name for name, parameter in net.named_parameters()}
    found = [
        ({name_of[p] for p in group["params"]}, group["lr"], group["base_lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        ({"embed.weight", "out.weight", "table"}, 0.2, 0.2, 0.3 if kind == "adamw" else 0.0),
        ({"out.bias", "norm.weight", "norm.bias"}, 0.2, 0.2, 0.0),
        ({"ratio", "span_vectors"}, span_lr or 0.2, span_lr or 0.2, 0.0),
    ]
    for group in optimizer.param_groups:
        assert group.get("momentum", 0.7) == 0.7 and group.get("betas", (0.5, 0.6)) == (0.5, 0.6)
        assert group.get("clip", 0.4) == 0.4
    set_lr(optimizer, 0.25)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, (span_lr or 0.2) / 2]
    assert config.global_clip == (0 if kind == "adagrad" else 0.4)


def test_empty_groups_are_left_out_and_nothing_is_refused() -> None:
    optimizer = make_optimizer([("b", nn.Parameter(torch.zeros(2)))], OptimConfig(), lambda _: False)
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="no parameter requires a gradient; there is nothing to train"):
        make_optimizer([("b", nn.Parameter(torch.zeros(2), requires_grad=False))], OptimConfig(), lambda _: False)


def test_warmup_is_that_of_the_papers_code() -> None:
    """Its LambdaLR(min(1, n / warmup)) is stepped before the optimiser, so the first step has n = 1."""
    config = OptimConfig(kind="adagrad", lr=0.07, schedule="constant", warmup=8)
    theirs = SGD([nn.Parameter(torch.zeros(1))], lr=0.07)
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda n: min(1, n / 8))
    ours = make_optimizer([("w", nn.Parameter(torch.zeros(1)))], config, lambda _: False)
    for step in range(12):
        theirs.step()  # of no effect; silences the warning about the order, which is the point here
        scheduler.step()
        set_lr(ours, lr_at(config, step, 100))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert lr_at(config, 0, 100) == 1 / 8 and lr_at(config, 7, 100) == 1


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_cosine(warmup: int) -> None:
    config = OptimConfig(schedule="cosine", warmup=warmup, floor=0.2)
    total = warmup + 40
    factors = [lr_at(config, step, total) for step in range(total + 10)]
    assert factors[:warmup] == [(n + 1) / warmup for n in range(warmup)]
    falling = [1.0, *factors[warmup:total]]
    assert falling == sorted(falling, reverse=True) and len(set(falling)) == 41
    assert falling[20] == pytest.approx(0.6) and falling[10] + falling[30] == pytest.approx(1.2)
    assert factors[total - 1 :] == pytest.approx([0.2] * 11)
    assert lr_at(OptimConfig(warmup=100), 49, 50) == 0.5  # shorter than its warm-up
    assert all(0 <= lr_at(OptimConfig(warmup=100), step, 100) <= 1 for step in range(120))


@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9])
def test_clip_global(max_norm: float) -> None:
    params = make(torch.float32)
    for p, g in zip(params, gradients(1, torch.float32), strict=True):
        p.grad = g.clone()
    params.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    true = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients(1, torch.float32)))
    norm = clip_global(iter(params), max_norm)
    assert norm.shape == () and float(norm) == pytest.approx(true, rel=1e-5)
    scale = min(1.0, max_norm / true) if max_norm else 1.0
    for p, g in zip(params, gradients(1, torch.float32), strict=False):
        torch.testing.assert_close(p.grad, g * scale, rtol=1e-4, atol=0)
    assert clip_global([nn.Parameter(torch.zeros(2))], 1.0) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "lion"}, "kind is 'lion'; expected one of adamw, muon, adagrad, sgd"),
        ({"schedule": "linear"}, "schedule is 'linear'; expected one of constant, cosine"),
        ({"lr": -1.0}, "lr is -1.0; expected a finite number, 0 or more"),
        ({"span_lr": math.nan}, "span_lr is nan; expected a finite number, 0 or more"),
        ({"clip": math.inf}, "clip is inf; expected a finite number, 0 or more"),
        ({"warmup": -5}, "warmup is -5; expected a finite number, 0 or more"),
        ({"momentum": 1.0}, "momentum is 1.0; expected 0 or more and less than 1"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0); expected 0 or more and less than 1"),
        ({"floor": 1.5}, "floor is 1.5; expected a share of lr, 0 … 1"),
    ],
)
def test_bad_settings(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        OptimConfig(**changes)
    assert str(error.value) == sentence


def test_muon_updates_matrices_inside_blocks_and_adamw_the_rest() -> None:
    """One step, by hand: the momentum's orthogonal factor, scaled to the size of AdamW's updates, with decay."""
    torch.manual_seed(0)
    named = {
        "blocks.0.up.weight": nn.Parameter(torch.randn(6, 4)),
        "embedding.weight": nn.Parameter(torch.randn(5, 4)),
        "blocks.0.norm.weight": nn.Parameter(torch.ones(4)),
        "blocks.0.spans": nn.Parameter(torch.rand(2)),
    }
    before = {name: p.detach().clone() for name, p in named.items()}
    config = OptimConfig(kind="muon", lr=0.1, span_lr=0.5, momentum=0.9, weight_decay=0.2)
    optimizer = make_optimizer(named.items(), config, lambda name: name.endswith("spans"))
    for p in named.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    gradient = named["blocks.0.up.weight"].grad
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    step = (before["blocks.0.up.weight"] * (1 - 0.1 * 0.2) - named["blocks.0.up.weight"].detach()) / 0.1
    found = step / (0.2 * 6**0.5)
    # Newton and Schulz' iteration leaves singular values between about 0.7 and 1.2 instead of 1
    assert (torch.linalg.svdvals(found) - 1).abs().max() < 0.35
    assert torch.linalg.matrix_norm(found - u @ v, 2) < 0.4
    for name, lr, decay in (
        ("embedding.weight", 0.1, 0.2),
        ("blocks.0.norm.weight", 0.1, 0.0),
        ("blocks.0.spans", 0.5, 0),
    ):
        wanted = before[name] * (1 - lr * decay) - lr * named[name].grad.sign()  # Adam's first step
        torch.testing.assert_close(named[name].detach(), wanted, rtol=0, atol=1e-5)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 1]
