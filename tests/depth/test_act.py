"""Adaptive computation time: weights, halting, ponder cost and skipped work, against Graves's equations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spanformer.depth import ACT, Pondering
from spanformer.model.config import AttentionConfig, DepthConfig, EncoderConfig, ModelConfig, PositionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.position.absolute import sinusoids

STEPS, DIM = 5, 6


def graves(states: Tensor, w: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One token: states [M, dim] → output, ρ, weights; written from the equations."""
    weights: list[Tensor] = []
    for n, s in enumerate(states):
        h = torch.sigmoid(w @ s + b)
        if sum(p.item() for p in weights) + h.item() >= 1 - epsilon or n == len(states) - 1:
            rest = 1 - sum(weights, torch.zeros((), dtype=s.dtype))
            weights.append(rest)
            return sum(p * s for p, s in zip(weights, states, strict=False)), n + 1 + rest, weights  # pyright: ignore
        weights.append(h)
    raise AssertionError


def ponder(act: ACT, states: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Pondering]:
    """Run ACT over given states [M, B, T, dim]."""
    run = act.start(states[0], padding)
    x = torch.zeros_like(states[0])
    for n, s in enumerate(states):
        x = run.after(n, x, s)
    out, cost = run.finish(x)
    return out, cost, run


def seeded_act(bias: float = -0.5, **settings) -> ACT:
    torch.manual_seed(0)
    return ACT(DIM, STEPS, bias=bias, cost=1.0, **settings).double()


def test_output_and_gradients_equal_the_equations() -> None:
    act = seeded_act()
    states = torch.randn(STEPS, 2, 7, DIM, dtype=torch.float64, requires_grad=True)
    out, cost, run = ponder(act, states)
    assert 1 < act.mean_steps() < STEPS  # type: ignore[operator]
    found = [graves(states[:, b, t], act.score.weight[0], act.score.bias[0], 0.01) for b in range(2) for t in range(7)]
    want = torch.stack([each[0] for each in found]).view(2, 7, DIM)
    rho = torch.stack([each[1] for each in found]).mean()
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(cost, rho, atol=1e-12, rtol=1e-12)
    assert run.taken.tolist() == [len(each[2]) for each in found]
    wrt = [states, act.score.weight, act.score.bias]
    weight = torch.randn_like(out)
    mine = torch.autograd.grad((out * weight).sum() + cost, wrt, retain_graph=True)
    dense = torch.autograd.grad((want * weight).sum() + rho, wrt)
    for a, b in zip(mine, dense, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_ponder_gradient_is_minus_one_before_the_last_step() -> None:
    act = seeded_act()
    h = torch.tensor([[0.2, 0.3, 0.1, 0.6, 0.9]], dtype=torch.float64, requires_grad=True)
    run = act.start(torch.zeros(1, 1, DIM, dtype=torch.float64))
    steps = iter(h[0])
    act.probability = lambda states: next(steps)[None]  # type: ignore[method-assign]
    x = torch.ones(1, 1, DIM, dtype=torch.float64)
    for n in range(4):
        run.after(n, x, x)
    assert run.active() is not None and not len(run.active())  # type: ignore[arg-type]
    _, cost = run.finish(x)
    torch.testing.assert_close(cost, torch.tensor(4 + 0.4, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(cost, h)
    assert gradient.tolist() == [[-1.0, -1.0, -1.0, 0.0, 0.0]]


@pytest.mark.parametrize("bias", [-50.0, -3.0, 0.0, 50.0])
def test_weights_sum_to_one_at_halt_and_cap(bias: float) -> None:
    act = seeded_act(bias).float()
    states = torch.ones(STEPS, 3, 5, DIM)  # Σ p s = Σ p
    out, _, _ = ponder(act, states)
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-6, rtol=0)


def test_blend_is_a_running_average() -> None:
    act = seeded_act(form="blend")
    states = torch.randn(STEPS, 1, 3, DIM, dtype=torch.float64)
    out, _, _ = ponder(act, states)
    for t in range(3):
        weights = graves(states[:, 0, t], act.score.weight[0], act.score.bias[0], 0.01)[2]
        want = torch.zeros(DIM, dtype=torch.float64)
        for p, s in zip(weights, states[:, 0, t], strict=False):
            want = p * s + (1 - p) * want
        torch.testing.assert_close(out[0, t], want)


def test_padding_does_no_work_and_costs_nothing() -> None:
    act = seeded_act()
    states = torch.randn(STEPS, 2, 4, DIM, dtype=torch.float64)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    _, cost, run = ponder(act, states, padding)
    each = [(0, t) for t in range(4)] + [(1, t) for t in range(2)]
    rho = [graves(states[:, b, t], act.score.weight[0], act.score.bias[0], 0.01)[1] for b, t in each]
    torch.testing.assert_close(cost, torch.stack(rho).mean())
    assert run.taken.view(2, 4)[1, 2:].tolist() == [0, 0]


def test_ponder_cost_warms_up() -> None:
    act = seeded_act(warmup=4)
    costs = []
    for _ in range(6):
        costs.append(round(act.weight().item(), 6))
        act.after_step()
    assert costs == [0, 0.25, 0.5, 0.75, 1, 1]
    assert "updates" in act.state_dict()


def config(kind: str = "lm", **more: object) -> ModelConfig:
    settings: dict[str, object] = dict(
        vocab=29, dim=32, layers=4, heads=4, stack="universal", kind=kind,
        attention=AttentionConfig(kind="adaptive_span", max_span=24, ramp=4, init=0.5),
        position=PositionConfig(kind="sinusoidal_per_layer"), depth=DepthConfig(kind="act", bias=-0.5),
    )  # fmt: skip
    return ModelConfig(**(settings | more))  # type: ignore[arg-type]


def small(**more) -> LM:
    torch.manual_seed(1)
    lm = LM(config(**more)).double().eval()
    with torch.no_grad():  # tokens halt at different steps
        if isinstance(lm.depth, ACT):
            lm.depth.score.weight.normal_(std=0.3)
    return lm


@pytest.mark.parametrize("kind", ["rotary", "shaw", "transformer_xl", "sinusoidal", "sinusoidal_per_layer"])
def test_every_step_is_told_its_number(kind: str) -> None:
    lm = small(position=PositionConfig(kind=kind), depth=DepthConfig(kind="fixed"))
    block = lm.ordered_blocks()[0]
    seen: list[Tensor] = []
    block.register_forward_hook(lambda _, given, out: seen.append(given[0]))
    with torch.no_grad():  # the block changes nothing
        for each in (block.attention.out, block.feedforward):
            for part in each.parameters():  # type: ignore[union-attr]
                part.zero_()
    lm(ids(1, 5))
    for n, (before, x) in enumerate(itertools.pairwise(seen), 2):
        step = sinusoids(torch.full((), n), 32).double()
        if kind == "sinusoidal_per_layer":
            step = step + sinusoids(torch.arange(5), 32)
        torch.testing.assert_close(x - before, step.double().expand_as(x), atol=1e-6, rtol=0)


def ids(*shape: int) -> Tensor:
    return torch.randint(29, shape, generator=torch.Generator().manual_seed(2))


def test_skipped_work_equals_computing_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, x = small(), ids(2, 33)
    rows: list[int] = []
    block = lm.ordered_blocks()[0]
    assert block.feedforward is not None
    block.feedforward.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[:-1].numel()))
    mine = lm(x)
    assert lm.depth is not None and lm.depth.latest is not None
    taken = lm.depth.latest
    assert 1 < taken.double().mean() < 4 and len(taken.unique()) > 2
    assert sum(rows) == taken.sum()  # a feed-forward row for each step of each token
    wrt = [p for p in lm.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(mine.logits.sin().sum() + mine.penalty, wrt, allow_unused=True)
    monkeypatch.setattr(Pondering, "active", lambda self: None)
    dense = lm(x)
    torch.testing.assert_close(mine.logits, dense.logits, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(mine.penalty, dense.penalty, atol=1e-12, rtol=1e-12)
    wanted = torch.autograd.grad(dense.logits.sin().sum() + dense.penalty, wrt, allow_unused=True)
    for a, b in zip(gradients, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_halted_states_stay_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, x, after = small().float(), ids(2, 17), []
    whole = Pondering.after
    monkeypatch.setattr(Pondering, "after", lambda self, n, b, x: after.append(whole(self, n, b, x)) or after[-1])
    lm(x)
    assert lm.depth is not None and lm.depth.latest is not None
    for n in range(2, 4):
        halted = lm.depth.latest <= n
        assert halted.any() and torch.equal(after[n][halted], after[n - 1][halted])


def test_never_halting_equals_fixed_depth() -> None:
    lm = small(depth=DepthConfig(kind="act", bias=-1e6))
    fixed = small(depth=DepthConfig())
    fixed.load_state_dict({k: v for k, v in lm.state_dict().items() if not k.startswith("depth.")})
    assert torch.equal(lm(ids(2, 19)).logits, fixed(ids(2, 19)).logits)
    assert len(fixed.blocks) == 1 and len(fixed.layers()) == 4


@pytest.mark.parametrize("position", ["sinusoidal_per_layer", "rotary"])
def test_decoding_equals_segments_and_one_pass(position: str) -> None:
    lm, x = small(position=PositionConfig(kind=position)), ids(2, 40)
    with torch.no_grad():
        whole = lm(x).logits
        first = lm(x[:, :23])
        by_segments = torch.cat([first.logits, lm(x[:, 23:], first.state).logits], 1)
        cache = lm.cache(2)
        by_cache = torch.cat([lm.decode(piece, cache) for piece in (x[:, :9], *x[:, 9:].split(1, 1))], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(by_segments, whole, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(by_cache, whole, atol=1e-9, rtol=1e-9)


def test_rows_of_a_batch_do_not_influence_each_other() -> None:
    lm, x = small(), ids(3, 21)
    together = lm(x).logits
    for row in range(3):
        torch.testing.assert_close(lm(x[row : row + 1]).logits[0], together[row], atol=1e-10, rtol=1e-10)


def test_later_tokens_change_nothing_earlier() -> None:
    lm, x = small(), ids(1, 30)
    other = torch.cat([x[:, :18], ids(1, 60)[:, -12:]], 1)
    torch.testing.assert_close(lm(x).logits[:, :18], lm(other).logits[:, :18], atol=1e-10, rtol=1e-10)


def test_encoder_and_seq2seq_ponder() -> None:
    torch.manual_seed(3)
    encoder = Encoder(config("encoder")).double()
    out = encoder(ids(2, 12), padding=torch.arange(12).expand(2, 12) >= 9)
    out.logits.sum().backward()
    assert encoder.depth is not None and encoder.depth.latest is not None
    assert (encoder.depth.latest[:, 9:] == 0).all() and (encoder.depth.latest[:, :9] > 0).all()
    half = EncoderConfig(attention=config().attention, position=config().position)
    model = Seq2Seq(config("seq2seq", encoder=half)).double().eval()
    source, x = ids(2, 11), ids(2, 8)
    whole = model(source, x).logits
    cache = model.start(source)
    by_cache = torch.cat([model.decode(piece, cache) for piece in x.split(1, 1)], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(by_cache, whole, atol=1e-9, rtol=1e-9)
    assert model.depth is not model.encoder.depth


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(depth=DepthConfig(kind="act"), stack="reversible"), "model.depth.kind is 'act'; expected 'fixed'"),
        (dict(attention=AttentionConfig(stack=("window(4)", "full"))), "model.stack is 'universal'"),
    ],
)
def test_bad_combinations_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config("lm", **settings)


@pytest.mark.parametrize(("field", "value"), [("epsilon", 0.0), ("cost", -1.0), ("warmup", -1), ("kind", "soon")])
def test_bad_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"model.depth.{field} is .*; expected"):
        DepthConfig(**{field: value})  # type: ignore[arg-type]
