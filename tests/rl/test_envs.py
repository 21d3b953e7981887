"""Batches of environments: the rules of each task, and gymnasium's side."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from spanformer.rl.envs.batch import BatchEnv, Step
from spanformer.rl.envs.gym import IDS, OURS, load_gymnasium, make_batch, register
from spanformer.rl.envs.memory_chain import MemoryChain
from spanformer.rl.envs.t_maze import DOWN, LEFT, RIGHT, UP, TMaze

ROWS, LENGTH = 64, 5


def episode(env: BatchEnv, answers: np.ndarray, walk: int) -> tuple[np.ndarray, list[Step]]:
    """The first observation, and the steps of one episode: `walk` until the last, then `answers` [N]."""
    env.seed(3)
    first = env.reset()
    steps = [env.step(np.full(env.rows, walk)) for _ in range(LENGTH)]
    return first, [*steps, env.step(answers)]


@pytest.mark.parametrize("right", [True, False])
def test_t_maze_rewards_the_turn_that_the_cue_shows(right: bool) -> None:
    env = TMaze(ROWS, LENGTH)
    env.seed(3)
    up = env.reset()[:, 0] == 1
    assert 0 < up.sum() < ROWS
    first, steps = episode(env, np.where(up == right, UP, DOWN), RIGHT)
    assert (first[:, 0] == up).all() and (first[:, 1] == ~up).all()
    assert all((s.final[:, :2] == 0).all() and not s.terminated.any() for s in steps[:-1])  # the cue is seen once
    assert (steps[-2].final == [0, 0, 0, 1]).all()
    assert steps[-1].terminated.all() and (steps[-1].success == right).all()
    assert np.allclose(sum(s.reward for s in steps), float(right))


def test_t_maze_cuts_an_episode_that_never_turns() -> None:
    env = TMaze(3, LENGTH)
    env.reset()
    steps = [env.step(np.full(3, LEFT)) for _ in range(2 * (LENGTH + 1))]
    assert not any(s.truncated.any() for s in steps[:-1])
    assert steps[-1].truncated.all() and not steps[-1].terminated.any() and (steps[-1].success == 0).all()
    assert np.allclose([s.reward for s in steps], -1 / LENGTH)


@pytest.mark.parametrize("right", [True, False])
def test_memory_chain_asks_for_the_first_bit(right: bool) -> None:
    env = MemoryChain(ROWS, LENGTH)
    env.seed(3)
    bit = (env.reset()[:, 2] == 1).astype(int)
    first, steps = episode(env, bit if right else 1 - bit, 0)
    assert set(first[:, 2]) == {-1, 1} and (steps[-2].final == [0, 1, 0]).all()
    assert not any(s.terminated.any() or s.reward.any() for s in steps[:-1])
    assert steps[-1].terminated.all() and (steps[-1].reward == (1 if right else -1)).all()
    assert (steps[-1].observation[:, 0] == 1).all()  # the next episode began


@pytest.mark.parametrize("name", OURS)
def test_batch_continues_exactly_from_its_arrays(name: str) -> None:
    env, other = make_batch(name, ROWS, LENGTH), make_batch(name, ROWS, LENGTH)
    env.seed(1)
    env.reset()
    actions = np.random.default_rng(0).integers(0, env.actions, (40, ROWS))
    for action in actions[:17]:
        seen = env.step(action).observation
    assert (other.load(env.arrays() or {}) == seen).all()
    env.seed(2)
    other.seed(2)
    for action in actions[17:]:
        for mine, theirs in zip(env.step(action), other.step(action), strict=True):
            assert np.array_equal(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("name", OURS)
def test_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has length 0 and 2 rows; expected at least 1 each"):
        make_batch(name, 2, 0)


def test_missing_gymnasium_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"gymnasium is not installed; .*spanformer\[rl\]"):
        load_gymnasium()
    assert make_batch("t_maze", 2, LENGTH).reset().shape == (2, 4)  # needs no gymnasium


@pytest.mark.parametrize("id", IDS)
def test_registered_environment_is_the_batch_of_one_row(id: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    register()
    register()  # a second time changes nothing
    single, batch = gymnasium.make(id, length=LENGTH), make_batch(IDS[id], 1, LENGTH)
    batch.seed(5)
    assert (single.reset(seed=5)[0] == batch.reset()[0]).all()
    for action in np.random.default_rng(0).integers(0, batch.actions, 60):
        seen, reward, over, cut, info = single.step(action)
        s = batch.step(np.array([action]))
        assert (seen == s.final[0]).all() and reward == s.reward[0] and (over, cut) == (s.terminated[0], s.truncated[0])
        if over or cut:
            assert info["is_success"] == s.success[0]
            break


def test_gymnasium_batch_cuts_and_begins_again() -> None:
    pytest.importorskip("gymnasium")
    env = make_batch("spanformer/TMaze-v0", 2, 0)
    env.seed(1)
    env.reset()
    steps = [env.step(np.full(2, LEFT)) for _ in range(2 * 51)]
    assert steps[-1].truncated.all() and not steps[-1].terminated.any() and (steps[-1].success == 0).all()
    assert env.arrays() is None  # episodes of gymnasium cannot be saved


def test_discrete_observation_is_one_hot() -> None:
    pytest.importorskip("gymnasium")
    env = make_batch("FrozenLake-v1", 2, 0)
    assert env.observation == 16 and (env.reset() == np.eye(16)[0]).all()


REFUSED = {
    "unknown id": (
        "Nowhere-v0",
        r"env.id is 'Nowhere-v0', which gymnasium cannot make .*expected t_maze, memory_chain",
    ),
    "continuous actions": ("Pendulum-v1", "whose actions are Box.*expected Discrete actions"),
    "tuple": ("Blackjack-v1", r"whose observations are Tuple.*expected a vector \(Box of one axis\) or Discrete"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_environment_is_refused(case: str) -> None:
    pytest.importorskip("gymnasium")
    id, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        make_batch(id, 1, 0)
