"""Exits: losses of all layers, oracles, classifiers and confidence against their equations; decoding = segments."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.depth import Confidence, Exits
from spanformer.depth.classifiers import Decided, Geometric
from spanformer.depth.confidence import saturation, softmax_response
from spanformer.depth.oracle import oracle_exits
from spanformer.model.config import AttentionConfig, DepthConfig, ModelConfig
from spanformer.model.lm import LM

LAYERS = 4


def make(**depth: object) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=23, dim=32, layers=LAYERS, heads=4, attention=AttentionConfig(max_span=24, ramp=4, init=0.5),
        depth=DepthConfig(kind="exits", **depth),  # type: ignore[arg-type]
    )  # fmt: skip
    lm = LM(config).double()
    with torch.no_grad():
        for each in exits_of(lm).maps or ():
            each.weight += torch.randn_like(each.weight) / 6  # pyright: ignore
    return lm


def exits_of(lm: LM) -> Exits:
    assert isinstance(lm.depth, Exits)
    return lm.depth


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(seed))


def layer_outputs(lm: LM, x: Tensor) -> list[Tensor]:
    """The true states after each layer."""
    found: list[Tensor] = []
    handles = [b.register_forward_hook(lambda _, __, out: found.append(out[0])) for b in lm.ordered_blocks()]
    lm(x)
    for handle in handles:
        handle.remove()
    return found


def mapped(lm: LM, states: list[Tensor]) -> list[Tensor]:
    """A_n x of the states x after each layer but the last."""
    matrices = [each.weight for each in exits_of(lm).maps or ()]
    return [*(s @ a.T for s, a in zip(states, matrices, strict=False)), *states[len(matrices) :]]  # pyright: ignore


@pytest.mark.parametrize(("rising", "maps"), [(False, False), (True, False), (True, True)])
def test_aligned_loss_is_the_weighted_mean_of_all_layers(rising: bool, maps: bool) -> None:
    lm, x, y = make(rising=rising, maps=maps), ids(2, 19), ids(2, 19, seed=2)
    states = mapped(lm, layer_outputs(lm.eval(), x))
    each = [F.cross_entropy(lm.predict(s.flatten(0, 1)), y.flatten()) for s in states]
    omega = torch.tensor([1.0, 2, 3, 4] if rising else [1.0] * 4, dtype=torch.float64)
    want = (torch.stack(each) * omega).sum() / omega.sum()
    out = lm.train()(x, targets=y)
    mechanisms = lm.eval()(x, targets=y).penalty  # of the spans
    torch.testing.assert_close(out.nll.mean() + out.penalty - mechanisms, want, atol=1e-10, rtol=1e-10)
    wrt = [*lm.blocks.parameters(), *exits_of(lm).parameters()]
    mine = torch.autograd.grad(out.nll.mean() + out.penalty - mechanisms, wrt, allow_unused=True)
    dense = torch.autograd.grad(want, wrt, allow_unused=True)
    for a, b in zip(mine, dense, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero if a is None else a, zero.to(a) if b is None and a is not None else b)  # type: ignore[arg-type]


def test_oracles_take_the_lowest_of_equal_layers() -> None:
    scores = torch.tensor([[0.0, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]])[:, None]
    assert oracle_exits(scores, 0.1).tolist() == [[1, 0, 2, 0]]
    assert oracle_exits(scores, 10.0).tolist() == [[0, 0, 0, 0]]
    assert oracle_exits(scores, 0.0).tolist() == [[1, 0, 2, 0]]


def test_oracle_smoothing_equals_the_sum_over_neighbours() -> None:
    scores = torch.randn(3, 2, 15, dtype=torch.float64)
    at = torch.arange(15.0, dtype=torch.float64)
    weight = torch.exp(-((at[:, None] - at) ** 2) / 2.5)
    want = (torch.einsum("lbs,ts->lbt", scores, weight) - 0.3 * torch.arange(3.0)[:, None, None]).argmax(0)
    assert torch.equal(oracle_exits(scores, 0.3, 2.5), want)


def test_geometric_loss_equals_its_distribution() -> None:
    torch.manual_seed(1)
    classifier, states = Geometric(8).double(), [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(LAYERS)]
    exits = torch.randint(LAYERS, (2, 5))
    chi = [classifier(x).sigmoid() for x in states[:-1]]
    q, rest = [], torch.ones(2, 5, dtype=torch.float64)
    for each in chi:
        q.append(each * rest)
        rest = rest * (1 - each)
    q = torch.stack([*q, rest])
    torch.testing.assert_close(q.sum(0), torch.ones_like(rest))
    torch.testing.assert_close(classifier.loss(states, exits), -q.gather(0, exits[None]).log().mean())


def test_multinomial_and_sequence_read_the_first_layer_without_the_future() -> None:
    torch.manual_seed(1)
    states = [torch.randn(2, 6, 8, dtype=torch.float64) for _ in range(LAYERS)]
    for whole in (False, True):
        classifier = Decided(8, LAYERS, whole=whole).double()
        changed = states[0].clone()
        changed[:, 4:] = math.nan
        assert torch.equal(classifier.logits(changed)[:, :4], classifier.logits(states[0])[:, :4])
        mean = states[0].cumsum(1) / torch.arange(1.0, 7)[:, None] if whole else states[0]
        exits = torch.randint(LAYERS, (2, 6))
        want = F.cross_entropy(classifier.score(mean).flatten(0, 1), exits.flatten())
        torch.testing.assert_close(classifier.loss(states, exits), want)


def test_calm_classifier_gives_the_layers_no_gradient() -> None:
    lm, x, y = make(classifier="calm"), ids(2, 9), ids(2, 9, seed=2)
    plain = make()
    plain.load_state_dict({k: v for k, v in lm.state_dict().items() if "classifier" not in k})
    for model in (lm, plain):
        out = model(x, targets=y)
        (out.nll.mean() + out.penalty).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(dict(lm.named_parameters())[name].grad, p.grad)
    classifier = exits_of(lm).classifier
    assert isinstance(classifier, Geometric) and classifier.score.weight.grad.abs().sum() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("fixed", [1, 2, 4])
def test_fixed_exit_by_cache_equals_by_segments(fixed: int, maps: bool) -> None:
    lm, x = make(maps=maps).eval(), ids(2, 30)
    exits_of(lm).fixed = fixed
    with torch.no_grad():
        whole = lm(x).logits
        first = lm(x[:, :17])
        segments = torch.cat([first.logits, lm(x[:, 17:], first.state).logits], 1)
        cache = lm.cache(2)
        decoded = torch.cat([lm.decode(piece, cache) for piece in (x[:, :5], *x[:, 5:].split(1, 1))], 1)  # type: ignore[arg-type]
    assert exits_of(lm).mean_steps() == fixed
    torch.testing.assert_close(segments, whole, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(decoded, whole, atol=1e-9, rtol=1e-9)
    if fixed == 1:  # the first layer's true states, read by the output layer
        torch.testing.assert_close(whole, lm.head.logits(lm.norm(mapped(lm, layer_outputs(lm, x))[0])))


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("measure", ["softmax", "saturation", "classifier"])
def test_confident_exits_by_cache_equal_by_segments(measure: str, maps: bool) -> None:
    lm, x = make(classifier="geometric", maps=maps).eval(), ids(2, 30)
    exits = exits_of(lm)
    with torch.no_grad():
        exits.confidence = Confidence(measure, 0.0)  # type: ignore[arg-type]
        lm(x)
        assert exits.mean_steps() == (2 if measure == "saturation" else 1)
        middle = {"softmax": 0.03, "saturation": 0.7, "classifier": 0.5}[measure]
        exits.confidence = Confidence(measure, middle)  # type: ignore[arg-type]
        whole = lm(x).logits
        assert 1 < exits.mean_steps() < LAYERS  # type: ignore[operator]
        cache = lm.cache(2)
        decoded = torch.cat([lm.decode(piece, cache) for piece in (x[:, :5], *x[:, 5:].split(1, 1))], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(decoded, whole, atol=1e-9, rtol=1e-9)


def test_each_token_is_read_through_the_map_of_its_exit() -> None:
    lm, x = make(maps=True).eval(), ids(2, 30)
    exits = exits_of(lm)
    exits.confidence = Confidence("softmax", 0.03)
    every = torch.empty(0)

    def keep(_: object, given: tuple[Tensor]) -> None:
        nonlocal every
        every = given[0]

    handle = lm.norm.register_forward_pre_hook(keep)
    with torch.no_grad():
        states, _, _ = lm.run_segment(lm.embedding(x), lm.start(2), None, None)
        taken = exits.latest
        lm(x)
    handle.remove()
    assert taken is not None and len(taken.unique()) == LAYERS
    for n in range(LAYERS):
        rows = states[taken == n + 1]
        torch.testing.assert_close(every[taken == n + 1], mapped(lm, [rows] * LAYERS)[n])


def test_maps_begin_as_no_maps() -> None:
    torch.manual_seed(0)
    exits = Exits(8, LAYERS, maps=True)
    x = torch.randn(5, 8)
    assert len(exits.maps or ()) == LAYERS - 1 and all(exits.read(n, x).equal(x) for n in range(LAYERS))


def test_mixed_training_trains_maps() -> None:
    lm, x, y = make(training="mixed", maps=True), ids(3, 14), ids(3, 14, seed=2)
    out = lm.train()(x, targets=y)
    out.nll.mean().backward()
    assert all(each.weight.grad.abs().sum() > 0 for each in exits_of(lm).maps or ())  # pyright: ignore


def test_no_confidence_runs_every_layer_bit_identically() -> None:
    lm, x = make().eval(), ids(2, 12)
    plain = lm(x).logits
    exits_of(lm).confidence = Confidence("softmax")
    assert torch.equal(lm(x).logits, plain) and exits_of(lm).mean_steps() == LAYERS


def test_confidence_measures_equal_their_equations() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    p = logits.softmax(-1).sort(-1).values
    torch.testing.assert_close(softmax_response(logits).double(), p[:, -1] - p[:, -2], atol=1e-6, rtol=1e-6)
    a, b = torch.randn(2, 5, 8)
    want = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    torch.testing.assert_close(saturation(a, b), want)


def test_threshold_decays_as_published() -> None:
    confidence = Confidence("softmax", 0.8, decay=4.0, length=64)
    for t in (0, 1, 32, 64):
        assert confidence.at(t) == pytest.approx(0.9 * 0.8 + 0.1 * math.exp(-4 * t / 64))
    assert Confidence("softmax", decay=4.0, length=64).at(3) == math.inf


def test_mixed_training_copies_states_upwards() -> None:
    lm, x, y = make(training="mixed"), ids(3, 14), ids(3, 14, seed=2)
    out = lm.train()(x, targets=y)
    (out.nll.mean() + out.penalty).backward()
    assert len(exits_of(lm).latest.unique()) == LAYERS  # type: ignore[union-attr]
    assert not exits_of(lm).states


def test_rows_do_not_influence_each_others_exits() -> None:
    lm, x = make().eval(), ids(3, 20)
    exits_of(lm).confidence = Confidence("saturation", 0.7)
    together = lm(x).logits
    for row in range(3):
        torch.testing.assert_close(lm(x[row : row + 1]).logits[0], together[row], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("make_it", "sentence"),
    [
        (lambda: Confidence("softmax", 1.5), r"threshold is 1.5; expected 0 … 1"),
        (lambda: Confidence("hope", 0.5), "measure is 'hope'; expected one of softmax"),  # type: ignore[arg-type]
        (lambda: Confidence("softmax", 0.5, decay=1.0), "decay is 1.0 with a length of 0"),
        (lambda: Exits(8, 1), "layers is 1; expected at least 2"),
        (lambda: DepthConfig(classifier="guess"), "model.depth.classifier is 'guess'; expected one of none"),  # type: ignore[arg-type]
        (lambda: ModelConfig(kind="encoder", depth=DepthConfig(kind="exits")), "model.depth.kind is 'exits'"),
    ],
)
def test_bad_input_is_one_sentence(make_it, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_it()


def test_classifier_measure_without_classifier_is_refused() -> None:
    lm = make().eval()
    exits_of(lm).confidence = Confidence("classifier", 0.5)
    with pytest.raises(ValueError, match="the model's exits have no classifier; train one"):
        lm(ids(1, 4))
