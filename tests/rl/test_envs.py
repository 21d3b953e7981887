"""Batches of environments: the rules of each task, and gymnasium's side."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np
import pytest

from spanformer.rl.envs.batch import BatchEnv, Step
from spanformer.rl.envs.graph import NODES, Graph, distances, distances_to, edges
from spanformer.rl.envs.gym import IDS, OURS, load_gymnasium, make_batch, register
from spanformer.rl.envs.key_to_door import MOVES, SIDE, STEPS, KeyToDoor
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


def towards(env: KeyToDoor) -> np.ndarray:
    """The action of each row that brings it nearer to the object, or against a wall."""
    way = env.thing - env.place
    rows, columns = way[:, 0], way[:, 1]
    return np.where(columns > 0, 0, np.where(columns < 0, 1, np.where(rows > 0, 2, 3)))


@pytest.mark.parametrize("takes_key", [True, False])
def test_key_to_door_pays_at_the_door_for_the_key(takes_key: bool) -> None:
    env = KeyToDoor(ROWS, LENGTH)
    env.seed(3)
    first = env.reset()
    assert first.shape == (ROWS, 3 + 4 * SIDE) and (first.sum(1) == 5).all() and (first[:, 0] == 1).all()
    found: list[Step] = []
    for t in range(STEPS + LENGTH):
        # action 3 stays in the corner, against the wall
        found.append(env.step(towards(env) if takes_key and t < STEPS else np.full(ROWS, 3)))
    assert (env.has_key == takes_key).all()
    assert not any(s.terminated.any() or s.reward.any() for s in found)
    assert all((s.final[:, 3:].sum(1) == 4).all() for s in found[STEPS - 1 : -1])  # the empty room shows its object
    door = found[-1].observation
    assert (door[:, 2] == 1).all() and (door[:, 3:].sum(1) == 4).all() and len(np.unique(door, axis=0)) == SIDE**2 - 1
    paid, over = np.zeros(ROWS), np.zeros(ROWS, bool)
    for _ in range(STEPS):
        s = env.step(towards(env))
        paid, over = paid + np.where(over, 0, s.reward), over | s.terminated
    assert (paid == takes_key).all() and over.all()


def test_key_to_door_ends_without_reward_and_hides_the_taken_key() -> None:
    env = KeyToDoor(ROWS, LENGTH)
    env.seed(3)
    env.reset()
    steps = [env.step(np.full(ROWS, 3)) for _ in range(2 * STEPS + LENGTH)]
    assert not any(s.terminated.any() for s in steps[:-1]) and steps[-1].terminated.all()
    assert (steps[-1].success == 0).all() and not any(s.reward.any() or s.truncated.any() for s in steps)
    near = (env.thing == [0, 1]).all(1)
    seen = env.step(np.where(near, 0, 3)).final
    assert (
        near.any() and (seen[near][:, 3 + 2 * SIDE :] == 0).all() and (seen[~near][:, 3 + 2 * SIDE :].sum(1) == 2).all()
    )
    assert (MOVES.sum(0) == 0).all()


def test_random_steps_seldom_open_the_door() -> None:
    env, random = make_batch("key_to_door", 2000, LENGTH), np.random.default_rng(0)
    env.seed(1)
    env.reset()
    found = np.concatenate([env.step(random.integers(0, 4, 2000)).success for _ in range(2 * STEPS + LENGTH)])
    assert 0.04 < np.nanmean(found) < 0.08


def test_graph_is_connected_and_its_distances_are_shortest_paths() -> None:
    joined = edges()
    assert (joined == joined.T).all() and not joined.diagonal().any() and (distances() < NODES).all()
    steps = np.where(joined, 1.0, np.inf)
    np.fill_diagonal(steps, 0)
    for k in range(NODES):  # Floyd and Warshall
        steps = np.minimum(steps, steps[:, k, None] + steps[None, k])
    assert all((distances_to(joined, goal) == steps[goal]).all() for goal in range(NODES))
    apart = np.zeros((3, 3), bool)
    apart[0, 1] = apart[1, 0] = True
    assert distances_to(apart, 0).tolist() == [0, 1, 3]


def test_graph_pays_for_each_edge_until_the_goal() -> None:
    env = Graph(300, 30)
    env.seed(3)
    start = env.reset().argmax(1)
    assert set(start.tolist()) == set(range(1, NODES))
    paid, over = np.zeros(300), np.zeros(300, bool)
    while not over.all():
        before = env.node.copy()
        nearest = np.array([np.argmin(distances()[env.next[node]]) for node in before])
        s = env.step(nearest)
        assert edges()[before, s.final.argmax(1)].all()
        paid, over = paid + np.where(over, 0, s.reward), over | s.terminated
        assert ((s.final.argmax(1) == 0) == s.terminated).all() and (s.success[s.terminated] == 1).all()
    assert (paid == -distances()[start]).all()


def test_graph_ends_a_late_walk_and_wraps_actions() -> None:
    env = Graph(ROWS, 7)
    env.seed(3)
    env.reset()
    far = distances()[env.node] > 7
    steps = [env.step(np.zeros(ROWS, np.int64)) for _ in range(7)]
    assert far.any() and steps[-1].terminated[far].all() and (steps[-1].success[far] == 0).all()
    assert (sum(s.reward for s in steps)[far] == -14).all() and not steps[-2].terminated[far].any()
    for node, row in enumerate(env.next):
        neighbours = np.flatnonzero(edges()[node])
        assert (row[: len(neighbours)] == neighbours[: env.actions]).all() and set(row) == set(neighbours)


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


class Odd:
    """An environment of gymnasium whose spaces are given."""

    metadata: ClassVar = {"render_modes": []}
    render_mode, spec = None, None

    def __new__(cls, seen: str) -> Any:
        gymnasium = load_gymnasium()
        box = gymnasium.spaces.Box(-1, 1, (3,))
        spaces = {"dict": gymnasium.spaces.Dict(a=box), "image": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)}

        class Made(gymnasium.Env):
            observation_space, action_space = spaces[seen], gymnasium.spaces.Discrete(2)

        return Made()


SPACES = {"dict": r"whose observations are Dict\(.*: flatten dicts, and encode images, by a wrapper of gymnasium",
          "image": r"whose observations are Box\(.*expected a vector \(Box of one axis\) or Discrete"}  # fmt: skip


@pytest.mark.parametrize("seen", SPACES)
def test_space_without_an_encoder_is_refused(seen: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    name = f"spanformer-test/{seen.title()}-v0"
    gymnasium.register(name, entry_point=Odd, kwargs={"seen": seen}, disable_env_checker=True)
    try:
        with pytest.raises(ValueError, match=f"env.id is '{name}', {SPACES[seen]}"):
            make_batch(name, 1, 0)
    finally:
        del gymnasium.registry[name]


MISSING = {
    "popgym-RepeatPreviousEasy-v0": ("popgym", "whose package popgym is not installed; install it with: pip install p"),
    "LunarLander-v3": ("Box2D", "which needs a package: .*box2d"),
    "Hopper-v5": ("mujoco", "which needs a package: .*mujoco"),
}


@pytest.mark.parametrize("id", MISSING)
def test_missing_package_of_an_environment_is_named(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    package, sentence = MISSING[id]
    for name in [n for n in sys.modules if n.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco", "popgym"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"env.id is '{id}', {sentence}"):
        make_batch(id, 1, 0)


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
