"""The language model as a whole: reading in pieces, causality, memory that follows spans, hybrid stacks, documents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from spanformer.attention import View
from spanformer.kinds import POSITIONS
from spanformer.memory import HiddenStates, LayerCall
from spanformer.memory.groups import group_heads
from spanformer.model.config import ModelConfig, PositionConfig
from spanformer.model.lm import LM, State
from spanformer.ops import Attended
from support.small_models import CONFIGS, SMALL, make, text, with_attention

CPU = torch.device("cpu")


def read(lm: LM, x: torch.Tensor, pieces: list[int]) -> tuple[torch.Tensor, State]:
    state, logits = None, []
    for piece in x.split(pieces, 1):
        found = lm(piece, state)
        state = found.state
        logits.append(found.logits)
    assert state is not None
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", [[64, 63], [1, 30, 96], [100, 1, 26]], ids=str)
def test_segments_equal_one_pass(name: str, pieces: list[int]) -> None:
    lm, x = make(CONFIGS[name]), text(2, 127)
    whole = lm(x).logits
    streamed, _ = read(lm, x, pieces)
    assert torch.allclose(streamed, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_future_tokens_have_no_effect(name: str) -> None:
    lm, x = make(CONFIGS[name]), text(2, 50)
    other = x.clone()
    other[:, 31:] = (other[:, 31:] + 1) % 37
    before, after = lm(x).logits, lm(other).logits
    assert torch.equal(before[:, :31], after[:, :31])
    assert not torch.allclose(before[:, 31:], after[:, 31:])


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_the_logits_and_reach_every_parameter(name: str) -> None:
    config = CONFIGS[name]
    lm, x = make(config), text(3, 64)
    first = lm(x[:, :30])
    found = lm(x[:, 30:-1], first.state, targets=x[:, 31:])
    logits = lm(x[:, 30:-1], first.state).logits
    expected = -logits.log_softmax(-1).gather(2, x[:, 31:, None])[..., 0]
    assert found.logits is None and torch.allclose(found.nll, expected)
    (found.nll.mean() + found.penalty).backward()
    # a bias over distances that every token sees alike, and clusters no token fell into, may stay without
    silent = [n for n, p in lm.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == [], silent


def test_memory_follows_the_longest_span_of_each_layer() -> None:
    lm = make(with_attention(SMALL, max_span=1000))
    with torch.no_grad():
        for module, ratio in zip(lm.spans_modules(), (0.0, 0.1, 0.5), strict=True):
            module.ratio.fill_(0)
            module.ratio[2] = ratio
    _, state = read(lm, text(1, 900), [100] * 9)
    assert state.tokens() == [128, 192, 576]
    assert all(not h.requires_grad for h in state.tensors().values())
    with torch.no_grad():
        lm.spans_modules()[2].ratio.fill_(0)  # shrinks at once, and grows as the text goes on
        lm.spans_modules()[0].ratio.fill_(0.3)
    state = lm(text(1, 100), state).state
    assert state.tokens() == [228, 192, 128]
    state = lm(text(1, 100), state).state
    assert state.tokens() == [328, 192, 128]


def test_heads_are_grouped_by_context_length() -> None:
    assert group_heads([31, 31, 31, 31], 128, CPU) == [([0, 1, 2, 3], 32)]
    assert group_heads([31, 8000, 40, 31], 8192, CPU) == [([1], 8000), ([0, 2, 3], 40)]
    assert group_heads([1000, 8000, 7000, 31], 8192, CPU) == [([1, 2], 8000), ([0], 1000), ([3], 32)]
    assert group_heads([31, 8000], 0, CPU) == [([0, 1], 0)]


def test_heads_are_one_group_on_cuda() -> None:
    cuda = torch.device("cuda")
    assert group_heads([31, 8000, 40, 31], 8192, cuda) == [([0, 1, 2, 3], 8000)]
    assert group_heads([31, 8000, 40, 31], 512, cuda) == [([0, 1, 2, 3], 512)]
    assert group_heads([31, 8000], 0, cuda) == [([0, 1], 0)]


def test_layer_on_cuda_makes_one_attend_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have a device and shapes, and no CUDA is needed."""
    lm = make(replace(with_attention(SMALL, max_span=300), position=PositionConfig(kind="none")))
    with torch.no_grad():
        lm.spans_modules()[0].ratio.zero_()[1] = 1.0
    layer, context = lm.layers()[0].attention, lm.context_length()[0]
    assert len(group_heads(context, 300, CPU)) == 2
    calls: list[tuple[int, int]] = []

    def attend(_memory, call: LayerCall, _rule, _turn, need: int, _kv_heads) -> Attended:
        calls.append((call.q.shape[1], need))
        return Attended(torch.zeros_like(call.q), call.q.new_zeros(call.q.shape[:3]))

    monkeypatch.setattr(
        HiddenStates, "_group", attend
    )  # where fake tensors would be indexed, which takes CUDA after all
    monkeypatch.setattr(layer.mechanism, "context_length", lambda: list(context))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, past = (torch.zeros(1, tokens, lm.config.dim, dtype=torch.float64, device="cuda") for tokens in (90, 330))
        weights = {name: torch.zeros_like(t, device="cuda") for name, t in layer.state_dict().items()}
        torch.func.functional_call(layer, weights, (x, HiddenStates(past), View(start=330), lm.position))
    assert calls == [(layer.heads, 304)]


@pytest.mark.parametrize("kind", [kind for kind in POSITIONS if not POSITIONS[kind].needs_length])
def test_heads_in_groups_keep_their_positions(kind: str) -> None:
    """One head looks far back and the others do not: they are served in two calls, under every position encoding."""
    position = PositionConfig(kind=kind)  # pyright: ignore[reportArgumentType]
    lm = make(replace(with_attention(SMALL, max_span=300), position=position))
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.zero_()
            module.ratio[1] = 1.0
    x = text(1, 420)
    context = lm.context_length()[0]
    assert len(group_heads(context, 300, CPU)) == 2
    whole = lm(x).logits  # nothing remembered: one call for all
    streamed, _ = read(lm, x, [330, 90])
    assert torch.allclose(streamed, whole, rtol=1e-9, atol=1e-9)


def test_packed_documents_do_not_see_each_other() -> None:
    lm, x = make(SMALL), text(1, 60)
    documents = torch.tensor([[0] * 25 + [1] * 35])
    alone = lm(x[:, 25:]).logits
    packed = lm(x, documents=documents).logits
    assert torch.allclose(packed[:, 25:], alone, rtol=1e-9, atol=1e-9)
    first = lm(x[:, :40], documents=documents[:, :40])
    second = lm(x[:, 40:], first.state, documents=documents[:, 40:])
    assert torch.allclose(second.logits, alone[:, 15:], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="documents was given with earlier segments and is missing now"):
        lm(x[:, 40:], first.state)


def test_padding_is_not_seen() -> None:
    lm, x = make(SMALL), text(2, 40)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, :13] = True
    alone = lm(x[:1, 13:]).logits
    padded = lm(x, padding=padding).logits
    assert torch.allclose(padded[:1, 13:], alone, rtol=1e-9, atol=1e-9)


def test_activation_checkpointing_changes_nothing() -> None:
    grads = []
    for checkpointing in (False, True):
        lm = make(SMALL).train()
        lm.checkpointing = checkpointing
        found = lm(text(2, 50), targets=text(2, 50))
        (found.nll.mean() + found.penalty).backward()
        grads.append([p.grad for p in lm.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


REFUSED = {
    "dim is 30": lambda: ModelConfig(dim=30, heads=4),
    "kv_heads is 3": lambda: ModelConfig(heads=4, kv_heads=3),
    "did you mean window": lambda: with_attention(SMALL, stack=("windows(3)",)),
    "5 heads; expected 4": lambda: with_attention(SMALL, stack=("3 window(3) + 2 full",)),
    "expected multiples of 2": lambda: with_attention(replace(SMALL, kv_heads=2), stack=("3 window(3) + 1 full",)),
    "outside the vocabulary; expected 0 … 36": lambda: make(SMALL)(torch.tensor([[40]])),
    "expected token ids": lambda: make(SMALL)(torch.tensor([1, 2])),
    "targets has shape": lambda: make(SMALL)(text(1, 5), targets=text(1, 4)),
    "vocab is 0": lambda: LM(ModelConfig()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
