"""Acting by a KV cache: what it gives is what the memory of training gives, in values and in the memory it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.model.config import AttentionConfig, DepthConfig, ModelConfig, PositionConfig
from spanformer.rl.config import PPOConfig
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.memory import Segments, compact
from spanformer.rl.playing import RingPlayer, SegmentPlayer, make_player
from spanformer.rl.policy import NO_ACTION, Policy, Seen
from spanformer.rl.ppo import update
from spanformer.rl.rollout import Actor
from spanformer.train.optim import OptimConfig, make_optimizer

PLAIN = ModelConfig(
    dim=16, layers=2, heads=2, attention=AttentionConfig(kind="window(9)"),
    position=PositionConfig(kind="transformer_xl"),
)  # fmt: skip
GATED = replace(PLAIN, block="gated")
RINGS = {
    "gated": GATED,
    "post-norm": replace(PLAIN, order="post"),
    "rotary": replace(GATED, position=PositionConfig(kind="rotary")),
    "grouped keys": replace(GATED, kv_heads=1),
    "spans": replace(GATED, attention=AttentionConfig(max_span=70, init=0.3, ramp=8)),
    "kinds of heads": replace(GATED, attention=AttentionConfig(kind="1 window(5) + 1 adaptive_span", max_span=90)),
    "kinds of layers": replace(GATED, attention=AttentionConfig(stack=("window(3)", "window(80)"))),
    "persistent": replace(GATED, attention=AttentionConfig(kind="window(9)"), persistent=3),
    "universal": replace(GATED, stack="universal"),
}
SEGMENTS = {
    "recurrent state": replace(GATED, attention=AttentionConfig(kind="retention"), position=PositionConfig("none")),
    "depth by step": replace(GATED, stack="universal", depth=DepthConfig(kind="act")),
}
ROWS, STEPS = 3, 170


def make(config: ModelConfig) -> Policy:
    torch.manual_seed(0)
    policy = Policy("transformer", config, 4, 3).double().eval()
    for name, weight in policy.named_parameters():
        if name.endswith("ratio"):
            weight.data.copy_(torch.linspace(0.1, 0.9, len(weight)))
    return policy


def some_steps() -> Seen:
    g = torch.Generator().manual_seed(1)
    begins = torch.rand(ROWS, STEPS, generator=g) < 0.02
    action = torch.randint(0, 3, (ROWS, STEPS), generator=g).masked_fill(begins, NO_ACTION)
    reward = torch.randn(ROWS, STEPS, generator=g, dtype=torch.float64)
    return Seen(torch.randn(ROWS, STEPS, 4, generator=g, dtype=torch.float64), action, reward, begins.long().cumsum(1))


def part(seen: Seen, some: slice) -> Seen:
    return Seen(*(t[:, some] for t in seen))


@pytest.mark.parametrize("name", RINGS)
def test_rings_give_what_the_memory_of_training_gives(name: str) -> None:
    """Over three windows, of which each begins from the memory that the one before left."""
    policy, seen = make(RINGS[name]), some_steps()
    ours = theirs = policy.start(ROWS)
    with torch.no_grad():
        for window in (slice(0, 60), slice(60, 61), slice(61, STEPS)):
            now, player = part(seen, window), make_player(policy, ours, record=True)
            assert isinstance(player, RingPlayer)
            expected = policy(now, theirs)
            for t in range(now.action.shape[1]):
                one = part(now, slice(t, t + 1))
                peeked = player.peek(one._replace(episode=player.episode[:, None], observation=one.observation + 1))
                found = player.step(one)
                assert (found.logits - expected.logits[:, t]).abs().max() < 1e-9
                assert (found.value - expected.value[:, t]).abs().max() < 1e-9
                assert (peeked.value - found.value).abs().max() > 1e-9
            ours, theirs = compact(player.memory()), compact(expected.memory)
            held, other = ours.tensors(), theirs.tensors()
            assert held.keys() == other.keys()
            for key in held:
                assert held[key].shape == other[key].shape
                assert (held[key] - other[key]).abs().max() < 1e-9


def test_peek_is_the_next_step_of_the_same_episode() -> None:
    policy, seen = make(GATED), some_steps()
    seen = seen._replace(episode=torch.zeros_like(seen.episode))
    stack = policy.stack()
    memory = policy.start(ROWS)
    assert stack is not None and isinstance(memory, Segments)
    ring = RingPlayer(policy, stack, memory, record=False)
    other = SegmentPlayer(policy, policy.start(ROWS))
    for t in range(30):
        one, later = part(seen, slice(t, t + 1)), part(seen, slice(t + 1, t + 2))
        ring.step(one)
        other.step(one)
        assert (ring.peek(later).value - other.peek(later).value).abs().max() < 1e-9


@pytest.mark.parametrize("name", SEGMENTS)
def test_other_memories_act_as_they_train(name: str) -> None:
    policy = make(SEGMENTS[name])
    assert isinstance(make_player(policy, policy.start(ROWS), record=True), SegmentPlayer)


@pytest.mark.parametrize("position", ["transformer_xl", "shaw", "distance_bias"])
def test_acting_follows_each_update(position: str) -> None:
    """Fused optimisers change tensors without a new version, by which tables of positions are kept."""
    torch.manual_seed(0)
    policy = make(replace(GATED, position=PositionConfig(kind=position, clip=4))).float()
    actor = Actor(make_batch("t_maze", 4, 5), policy)
    optimizer = make_optimizer(policy.named_parameters(), OptimConfig(lr=0.03), lambda name: False)
    for _ in range(3):
        window, _ = actor.collect(12)
        with torch.no_grad():
            found = policy(window.seen, window.memory)
        log_prob = found.logits.log_softmax(-1).gather(-1, window.action[..., None])[..., 0]
        assert (log_prob - window.log_prob).abs().max() < 1e-4 and (found.value - window.value).abs().max() < 1e-4
        update(policy, optimizer, window, PPOConfig(minibatches=2), 1.0, lambda: None)
