"""Decision Transformer: transformers' model with the same weights, causality, padding, caches, and what is sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.rl.decision import DecisionTransformer, Steps, Task
from spanformer.rl.decision_data import Recorded, Streams
from spanformer.rl.decision_play import Cached, Window, play
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.recording import random_player, record
from spanformer.rl.trajectories import About, Trajectories

PAPER = ModelConfig(
    dim=32, layers=3, heads=2, norm="layer", attention=AttentionConfig(kind="full", max_span=256, bias=True),
    position=PositionConfig(kind="none"), feedforward=FeedForwardConfig(kind="relu", bias=True),
)  # fmt: skip
MODELS = {
    "paper": PAPER,
    "window": replace(PAPER, attention=AttentionConfig(kind="window(17)")),
    "learned spans": replace(PAPER, attention=AttentionConfig(max_span=64, init=0.2)),
    "gated, rotary": replace(
        PAPER, block="gated", position=PositionConfig(kind="rotary"), attention=AttentionConfig(kind="window(20)")
    ),
}
B, T, SEEN, A, LONGEST = 3, 12, 5, 4, 30


def make(config: ModelConfig, *, continuous: bool = False, returns: bool = True) -> DecisionTransformer:
    torch.manual_seed(0)
    model = DecisionTransformer(config, Task(SEEN, A, continuous, LONGEST), returns=returns).double().eval()
    with torch.no_grad():  # every weight counts, also those that begin at 0 or 1
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p))
        model.stack.after_step()
    return model


def some_steps(*, continuous: bool = False, steps: int = T) -> Steps:
    g = torch.Generator().manual_seed(1)
    action = (
        torch.randn(B, steps, A, generator=g).double() if continuous else torch.randint(0, A, (B, steps), generator=g)
    )
    return Steps(
        torch.randn(B, steps, generator=g).double(), torch.randn(B, steps, SEEN, generator=g).double(), action,
        torch.arange(steps).expand(B, -1), torch.zeros(B, steps, dtype=torch.bool),
    )  # fmt: skip


def copied(theirs: nn.Module, mine: DecisionTransformer) -> None:
    """Copy every weight of transformers' model; matrices of its GPT-2 are stored as inputs × outputs."""
    gpt: nn.Module = theirs.encoder  # pyright: ignore[reportAssignmentType]
    found = dict(theirs.named_parameters())
    state = {"time.weight": found["embed_timestep.weight"], "mean": mine.mean, "std": mine.std, "scale": mine.scale}
    names = {"ask": "embed_return", "observe": "embed_state", "acted": "embed_action", "norm": "embed_ln",
             "act": "predict_action.0", "stack.norm": "encoder.ln_f"}  # fmt: skip
    for ours, name in names.items():
        state |= {f"{ours}.{part}": found[f"{name}.{part}"] for part in ("weight", "bias")}
    # its GPT-2 adds the vector of position 0 to every token
    state["norm.bias"] = state["norm.bias"] + found["encoder.wpe.weight"][0]
    for n in range(len(mine.stack.layers())):
        a, b = f"stack.blocks.{n}.", f"encoder.h.{n}."
        for part in ("weight", "bias"):
            turned = {name: t.t() for name, t in found.items() if name.startswith(b) and name.endswith(part)}
            qkv = turned[f"{b}attn.c_attn.{part}"].chunk(3)
            state |= {f"{a}attention.{name}.{part}": t for name, t in zip(("query", "key", "value"), qkv, strict=True)}
            state[f"{a}attention.out.{part}"] = turned[f"{b}attn.c_proj.{part}"]
            state[f"{a}feedforward.up.{part}"] = turned[f"{b}mlp.c_fc.{part}"]
            state[f"{a}feedforward.down.{part}"] = turned[f"{b}mlp.c_proj.{part}"]
            state |= {f"{a}norm{k}.{part}": found[f"{b}ln_{k}.{part}"] for k in (1, 2)}
    assert len(list(gpt.parameters())) == 2 + 2 + 12 * len(mine.stack.layers())
    mine.load_state_dict(state)


@pytest.mark.parametrize("continuous", [True, False])
def test_equals_the_model_of_transformers(continuous: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DecisionTransformerConfig(
        state_dim=SEEN, act_dim=A, hidden_size=32, n_layer=3, n_head=2, max_ep_len=LONGEST, action_tanh=continuous,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(2)
    theirs = transformers.DecisionTransformerModel(config).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():  # biases begin at 0
            p.copy_(0.3 * torch.randn_like(p))
    mine = make(PAPER, continuous=continuous)
    copied(theirs, mine)
    steps = some_steps(continuous=continuous)
    padding = torch.arange(T) < torch.tensor([[0], [3], [7]])  # on the left
    steps = steps._replace(padding=padding, time=(steps.time - padding.sum(1, keepdim=True)).clamp(min=0))
    done = steps.action if continuous else nn.functional.one_hot(steps.action, A).double()
    with torch.no_grad():
        expected = theirs(
            states=steps.observation, actions=done, returns_to_go=steps.asked[..., None], timesteps=steps.time,
            attention_mask=(~padding).long(),
        ).action_preds  # fmt: skip
        found = mine(steps).action
    assert (found - expected)[~padding].abs().max() < 1e-5 and expected.abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("returns", [True, False])
def test_prediction_sees_no_later_step_and_not_its_own_action(name: str, returns: bool) -> None:
    model, steps, at = make(MODELS[name], returns=returns), some_steps(), 6
    whole = model(steps).action
    action = steps.action.clone()
    action[:, at] = (action[:, at] + 1) % A
    asked, seen = steps.asked.clone(), steps.observation.clone()
    asked[:, at + 1 :], seen[:, at + 1 :] = torch.nan, torch.nan
    other = model(steps._replace(action=action, asked=asked, observation=seen)).action
    assert torch.equal(whole[:, : at + 1], other[:, : at + 1])
    before = steps.action.clone()
    before[:, at - 1] = (before[:, at - 1] + 1) % A
    assert (model(steps._replace(action=before)).action - whole)[:, at].abs().max() > 1e-6
    asked = steps.asked.clone()
    asked[:, at] += 1
    assert ((model(steps._replace(asked=asked)).action - whole)[:, at].abs().max() > 1e-6) == returns


@pytest.mark.parametrize("name", MODELS)
def test_left_padding_changes_nothing(name: str) -> None:
    model, steps, n = make(MODELS[name]), some_steps(), 5
    padded = Steps.join([steps.part(slice(0, n))._replace(padding=torch.ones(B, n).bool()), steps])
    assert (model(padded).action[:, n:] - model(steps).action).abs().max() < 1e-9
    assert abs(float((model.loss(model(padded), padded) - model.loss(model(steps), steps)).detach())) < 1e-9


@pytest.mark.parametrize("continuous", [True, False])
def test_loss_is_its_definition(continuous: bool) -> None:
    model, steps = make(PAPER, continuous=continuous), some_steps(continuous=continuous)
    steps = steps._replace(padding=torch.arange(T) < torch.tensor([[0], [3], [7]]))
    found, total = model(steps), 0.0
    real = (~steps.padding).nonzero().tolist()
    for b, t in real:
        a, y = found.action[b, t].detach(), steps.action[b, t]
        total += float(((a - y) ** 2).mean() if continuous else a.logsumexp(0) - a[y])
    assert abs(float(model.loss(found, steps).detach()) - total / len(real)) < 1e-9
    if continuous:
        assert found.action.abs().max() <= 1


@pytest.mark.parametrize("name", MODELS)
def test_cached_episode_is_one_pass(name: str) -> None:
    """Also through learned spans shorter than the episode, and in segments with memory."""
    model, steps = make(MODELS[name]), some_steps(steps=25)
    whole = model(steps).action
    context = Cached(model, B)
    for t in range(25):
        found = context.act(steps.asked[:, t], steps.observation[:, t])
        assert (found - whole[:, t]).abs().max() < 1e-5
        context.did(steps.action[:, t])
    state, parts = None, []
    steps = steps._replace(episode=torch.zeros(B, 25, dtype=torch.int64))
    for at in range(0, 25, 7):
        found = model(steps.part(slice(at, at + 7)), state)
        state = found.state
        parts.append(found.action)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5


def test_window_context_is_a_pass_over_the_last_steps() -> None:
    model, steps, k = make(PAPER), some_steps(), 5
    context = Window(model, B, k)
    for t in range(T):
        last = steps.part(slice(max(0, t - k + 1), t + 1))
        found = context.act(steps.asked[:, t], steps.observation[:, t])
        context.did(steps.action[:, t])
        assert (found - model(last).action[:, -1]).abs().max() < 1e-9
    # and that is not what a KV cache over the episode gives
    assert (found - model(steps).action[:, -1]).abs().max() > 1e-6


def some_data(name: str = "key_to_door", count: int = 40) -> Trajectories:
    env = make_batch(name, 10, 3)
    env.seed(1)
    return record(random_player(env, 1), 10, count, About(name, 3, env.actions, False, "random steps", 1))


def test_windows_are_drawn_by_the_length_of_episodes() -> None:
    data, k = some_data(), 6
    steps = Recorded(data).windows(np.random.default_rng(0), 4000, k)
    real = ~steps.padding.numpy()
    assert (real[:, -1]).all() and (np.diff(real.astype(int), axis=1) >= 0).all()  # padding on the left only
    first = steps.time.numpy()[np.arange(4000), k - real.sum(1)]
    share = np.bincount(first, minlength=15)[:15] / 4000
    expected = np.bincount(data.time, minlength=15) / data.steps
    assert np.abs(share - expected).max() < 0.03
    time = steps.time.numpy()
    assert (np.diff(time, axis=1)[real[:, :-1]] == 1).all()


def test_streams_hold_whole_episodes_in_order() -> None:
    data = some_data()
    random, streams = np.random.default_rng(0), Streams(Recorded(data), 3)
    parts = [streams.segment(random, 7) for _ in range(9)]
    saved = {name: t.clone() for name, t in streams.tensors().items()}
    whole = Steps.join(parts)
    time, episode = whole.time, whole.episode
    assert episode is not None
    new = torch.cat([torch.ones(3, 1).bool(), episode.diff(dim=1) == 1], 1)
    assert (time[new] == 0).all() and (time.diff(dim=1)[~new[:, 1:]] == 1).all() and new.sum() > 6
    lengths = set(data.lengths.tolist())
    for row in range(3):
        counts = torch.unique_consecutive(episode[row], return_counts=True)[1].tolist()
        assert set(counts[:-1]) <= lengths
    again = Streams(Recorded(data), 3)
    again.load(saved)
    one, two = (s.segment(np.random.default_rng(5), 7) for s in (streams, again))
    assert torch.equal(one.observation, two.observation) and one.time.tolist() == two.time.tolist()
    assert whole.asked.shape == (3, 63)


@pytest.mark.parametrize("context", ["window", "cache"])
def test_what_is_asked_for_falls_by_the_rewards(context: str) -> None:
    """On a graph each step pays −1, so that step t asks for the first target plus t."""
    env = make_batch("graph", 4, 6)
    torch.manual_seed(0)
    config = replace(PAPER, layers=1)
    model = DecisionTransformer(config, Task(env.observation, env.actions, False, 6)).eval()
    heard: list[torch.Tensor] = []

    class Spy:
        def __init__(self, rows: int) -> None:
            self.inner = Window(model, rows, 3) if context == "window" else Cached(model, rows)

        def act(self, asked: torch.Tensor, observation: torch.Tensor) -> torch.Tensor:
            heard.append(asked.clone())
            return self.inner.act(asked, observation)

        def did(self, action: torch.Tensor) -> None:
            self.inner.did(action)

    found = play(model, env, Spy, lambda first: np.full(len(first), -5.0), 4, seed=1)
    assert (found.asked == -5).all() and (found.returns == -found.lengths - 6 * (found.success == 0)).all()
    assert all((asked == -5 + t).all() for t, asked in enumerate(heard))


def test_mean_and_deviation_of_the_data_normalise_states() -> None:
    model, steps = make(PAPER), some_steps()
    before = model(steps).action
    model.fit_data(torch.full((SEEN,), 2.0), torch.tensor([0.5, 0.5, 0.5, 0.5, 0.0]), 3.0)
    wide = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0])
    moved = steps._replace(observation=steps.observation * wide + 2.0, asked=steps.asked * 3.0)
    assert (model(moved).action - before).abs().max() < 1e-9
