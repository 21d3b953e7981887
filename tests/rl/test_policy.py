"""Policies: stepping with memory equals one long pass, and no episode sees another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.rl.memory import compact
from spanformer.rl.policy import NO_ACTION, Policy, Seen

PLAIN = ModelConfig(
    dim=32, layers=2, heads=2, attention=AttentionConfig(kind="window(40)"),
    position=PositionConfig(kind="transformer_xl"),
)  # fmt: skip
MODELS = {
    "gated": replace(PLAIN, block="gated"),
    "pre-norm": PLAIN,
    "post-norm": replace(PLAIN, order="post"),
    "adaptive spans": replace(PLAIN, attention=AttentionConfig(max_span=64, init=0.3)),
    "rotary": replace(PLAIN, block="gated", position=PositionConfig(kind="rotary")),
    "lstm": PLAIN,
    "mlp": PLAIN,
}
ROWS, STEPS = 3, 150


def make(name: str) -> Policy:
    torch.manual_seed(0)
    return Policy(name if name in ("lstm", "mlp") else "transformer", MODELS[name], 4, 3).double()


def some_steps(steps: int = STEPS, seed: int = 1) -> Seen:
    """Rows whose episodes end at different steps."""
    g = torch.Generator().manual_seed(seed)
    ends = torch.rand(ROWS, steps, generator=g) < 0.03
    begins = torch.cat([torch.ones(ROWS, 1, dtype=torch.bool), ends[:, :-1]], 1)
    action = torch.randint(0, 3, (ROWS, steps), generator=g).masked_fill(begins, NO_ACTION)
    reward = torch.randn(ROWS, steps, generator=g, dtype=torch.float64).masked_fill(begins, 0.0)
    return Seen(torch.randn(ROWS, steps, 4, generator=g, dtype=torch.float64), action, reward, begins.long().cumsum(1))


def part(seen: Seen, some: slice) -> Seen:
    return Seen(*(t[:, some] for t in seen))


def start(policy: Policy):
    memory = policy.start(ROWS)
    held = {n: t.double() if t.is_floating_point() else t for n, t in memory.tensors().items()}
    return memory.with_tensors(held)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 37])
def test_stepping_with_memory_is_one_long_pass(name: str, length: int) -> None:
    policy, seen = make(name), some_steps()
    whole = policy(seen, start(policy))
    memory, logits, values = start(policy), [], []
    with torch.no_grad():
        for at in range(0, STEPS, length):
            found = policy(part(seen, slice(at, at + length)), memory)
            memory = found.memory if at % 2 else compact(found.memory)
            logits.append(found.logits)
            values.append(found.value)
    assert (torch.cat(logits, 1) - whole.logits).abs().max() < 1e-5
    assert (torch.cat(values, 1) - whole.value).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_new_episode_is_a_fresh_memory(name: str) -> None:
    """Each row begins its last episode at its own step."""
    policy, seen = make(name), some_steps()
    whole = policy(seen, start(policy))
    for row in range(ROWS):
        last = int(seen.episode[row, -1])
        begins = int((seen.episode[row] == last).nonzero()[0])
        assert begins > 0
        alone = Seen(*(t[row : row + 1, begins:] for t in seen))
        index = torch.tensor([row])
        fresh = policy(alone, start(policy).rows(index))
        assert (fresh.logits[0] - whole.logits[row, begins:]).abs().max() < 1e-5


@pytest.mark.parametrize("name", [n for n in MODELS if n != "mlp"])
def test_memory_reaches_the_decision(name: str) -> None:
    policy, seen = make(name), some_steps()._replace(episode=torch.zeros(ROWS, STEPS, dtype=torch.int64))
    other = seen._replace(observation=seen.observation.index_fill(1, torch.tensor([STEPS - 10]), 3.0))
    change = (policy(seen, start(policy)).logits - policy(other, start(policy)).logits).abs()
    assert change[:, : STEPS - 10].max() == 0 and change[:, -1].max() > 1e-6


def test_mlp_sees_the_observation_only() -> None:
    policy, seen = make("mlp"), some_steps()
    other = seen._replace(action=seen.action.clamp(max=0), reward=seen.reward + 1)
    assert torch.equal(policy(seen, policy.start(ROWS)).logits, policy(other, policy.start(ROWS)).logits)


def test_gradients_stay_in_the_window() -> None:
    policy, seen = make("gated"), some_steps(80)
    seen = seen._replace(
        episode=torch.zeros(ROWS, 80, dtype=torch.int64), observation=seen.observation.requires_grad_()
    )
    memory = policy(part(seen, slice(0, 40)), start(policy)).memory
    policy(part(seen, slice(40, 80)), memory).logits[:, -1].square().sum().backward()
    grad = seen.observation.grad
    assert grad is not None and grad[:, :40].abs().max() == 0 and grad[:, 45].abs().max() > 0
