"""What a layer remembers: the last states, on a tape that is written on without touching what a state already holds."""

from __future__ import annotations

import pytest
import torch

from spanformer import LM
from spanformer.memory import State
from spanformer.memory.segment import remember
from spanformer.model.config import AttentionConfig, ModelConfig


@pytest.mark.parametrize("dim", [16, 5], ids=["on a tape", "copied"])
@pytest.mark.parametrize("length", [0, 3, 7, 40])
def test_memory_holds_the_last_states(length: int, dim: int) -> None:
    torch.manual_seed(length)
    everything = torch.randn(2, 0, dim)
    memory, tape = everything, None
    for new in (4, 9, 1, 30, 2, 2, 8, 64, 5):
        x = torch.randn(2, new, dim)
        everything = torch.cat([everything, x], 1)
        memory, tape = remember(memory, x, length, tape)
        assert torch.equal(memory, everything[:, max(0, everything.shape[1] - length) :])


def test_tape_serves_several_segments_without_a_copy() -> None:
    memory, tape = remember(torch.zeros(1, 64, 16), torch.ones(1, 8, 16), 64, layer=1)
    again, same = remember(memory, torch.ones(1, 8, 16), 64, tape)
    assert same is tape and again.data_ptr() == memory[:, 8:].data_ptr()


def test_layers_copy_their_memories_to_new_tapes_in_turn() -> None:
    copied = []
    for layer in range(4):
        memory, tape, when = torch.zeros(1, 64, 16), None, []
        for step in range(12):
            memory, new = remember(memory, torch.ones(1, 8, 16), 64, tape, layer)
            if tape is not None and new is not tape:
                when.append(step)
            tape = new
        copied.append(when)
    assert all(len(when) >= 2 for when in copied)
    assert len({step for when in copied for step in when}) == sum(map(len, copied))  # never two at a time


def test_state_continued_twice_gives_independent_results() -> None:
    torch.manual_seed(0)
    lm = LM(ModelConfig(vocab=11, dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=64, init=0.5)))
    start, left, right, end = torch.randint(0, 11, (4, 1, 12))
    state = lm(start).state
    state = lm(start, state).state
    assert any(layer.tape is not None for layer in state.layers)

    def story(middle: torch.Tensor, state: State) -> State:
        return lm(middle, state).state

    one, other = story(left, state), story(right, state)
    alone = story(left, lm(start, lm(start).state).state)
    assert torch.equal(lm(end, one).logits, lm(end, alone).logits)
    assert not torch.equal(lm(end, one).logits, lm(end, other).logits)


def test_backward_pass_may_come_after_later_segments() -> None:
    torch.manual_seed(0)
    lm = LM(ModelConfig(vocab=11, dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=64, init=0.5)))
    x = torch.randint(0, 11, (4, 2, 12))
    state = lm(x[0]).state
    first = lm(x[1], state)
    found = lm(x[2], first.state)
    lm(x[3], found.state)
    first.logits.sum().backward()
    late = [p.grad.clone() for p in lm.parameters() if p.grad is not None]
    lm.zero_grad()
    lm(x[1], lm(x[0]).state).logits.sum().backward()
    for a, b in zip(late, (p.grad for p in lm.parameters() if p.grad is not None), strict=True):
        assert torch.equal(a, b)
