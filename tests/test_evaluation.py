"""Evaluation against an environment whose returns can be worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from dask_mohpo.evaluation import Evaluator

ENV_ID = "test-countdown-v0"
TRUNCATED_ID = "test-cut-short-v0"


class Countdown(gym.Env[np.ndarray, np.int64]):
    """Lasts as many steps as the first action says, plus 1; each step brings (1, the start).

    The start is a random number of the episode; an observation is (the start, steps to go).
    """

    def __init__(self, truncates: bool = False) -> None:
        self.truncates = truncates
        self.observation_space = gym.spaces.Box(0.0, 9.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(9)
        self.reward_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.reward_dim = 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.start = np.float32(self.np_random.random())
        self.left: int | None = None
        return np.array([self.start, 0.0], np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        self.left = int(action) if self.left is None else self.left - 1
        obs = np.array([self.start, self.left], np.float32)
        reward = np.array([1.0, self.start], np.float32)
        over = self.left == 0
        return obs, reward, over and not self.truncates, over and self.truncates, {}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gym.register(ENV_ID, lambda **_: Countdown())
    gym.register(TRUNCATED_ID, lambda **_: Countdown(truncates=True))
    yield
    del gym.registry[ENV_ID], gym.registry[TRUNCATED_ID]


class Constant:
    """Learner s has one policy for each entry of lengths[s]: it always takes that action."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = lengths
        self.widths: list[int] = []

    @property
    def counts(self) -> list[int]:
        return [len(some) for some in self.lengths]

    def start(self, policy: np.ndarray) -> Constant:
        self.actions = np.array([[self.lengths[s][p] for p in row] for s, row in enumerate(policy)])
        return self

    def act(self, obs: np.ndarray) -> np.ndarray:
        assert obs.shape[:2] == self.actions.shape
        self.widths.append(obs.shape[1])
        return self.actions

    def observe(self, rewards: np.ndarray) -> None:
        assert rewards.shape == (*self.actions.shape, 2)

    def keep(self, rows: np.ndarray) -> None:
        self.actions = np.take_along_axis(self.actions, rows, axis=1)


class Watchful(Constant):
    """Checks in every row that observations and rewards stay those of the row's own episode."""

    def start(self, policy: np.ndarray) -> Watchful:
        super().start(policy)
        self.expected: np.ndarray | None = None
        self.seen = 0
        return self

    def act(self, obs: np.ndarray) -> np.ndarray:
        if self.expected is None:
            self.expected = obs.copy()
            # a row without an episode, of a learner with fewer policies, has zeros from the start
            self.left = np.where(obs[..., 0] > 0, self.actions + 1, 0)
        running = self.left > 0
        np.testing.assert_array_equal(obs[running], self.expected[running])
        return super().act(obs)

    def observe(self, rewards: np.ndarray) -> None:
        assert self.expected is not None
        running = self.left > 0
        np.testing.assert_array_equal(rewards[running][:, 1], self.expected[running][:, 0])
        assert not rewards[~running].any()
        self.left -= running
        self.expected[..., 1] = self.left
        self.seen += running.sum()

    def keep(self, rows: np.ndarray) -> None:
        assert self.expected is not None
        super().keep(rows)
        self.expected = np.take_along_axis(self.expected, rows[..., None], axis=1)
        self.left = np.take_along_axis(self.left, rows, axis=1)


def evaluate(
    lengths: Sequence[Sequence[int]], seeds: Sequence[int], gamma: float = 1.0, episodes: int = 1
) -> list[np.ndarray]:
    evaluator = Evaluator(ENV_ID, seeds, gamma=gamma, num_episodes=episodes)
    returns = evaluator.returns(Constant(lengths))
    evaluator.close()
    return returns


def test_returns_are_discounted_sums() -> None:
    [returns] = evaluate([[0, 2]], [1], gamma=0.5)
    assert returns.shape == (2, 1, 2)
    np.testing.assert_allclose(returns[:, 0, 0], [1.0, 1.0 + 0.5 + 0.25])


def test_every_policy_of_a_learner_plays_the_same_seeded_episodes() -> None:
    [returns] = evaluate([[0, 0, 3]], [1], episodes=4)
    starts = returns[0, :, 1]
    assert len(set(starts)) == 4
    np.testing.assert_allclose(returns[1, :, 1], starts)
    np.testing.assert_allclose(returns[2, :, 1], 4 * starts, rtol=1e-6)
    np.testing.assert_array_equal(evaluate([[0]], [1], episodes=4)[0][0, :, 1], starts)
    assert not set(starts) & set(evaluate([[0]], [2], episodes=4)[0][0, :, 1])


def test_the_same_evaluator_plays_the_same_episodes_again() -> None:
    evaluator = Evaluator(ENV_ID, [1, 2], gamma=0.9, num_episodes=3)
    first, _, again = (
        evaluator.returns(Constant(lengths))
        for lengths in ([[3, 1], [0]], [[5], [5]], [[3, 1], [0]])
    )
    for before, after in zip(first, again, strict=True):
        np.testing.assert_array_equal(before, after)


def test_an_episode_cut_short_ends_as_well() -> None:
    evaluator = Evaluator(TRUNCATED_ID, [1], gamma=0.5, num_episodes=1)
    [returns] = evaluator.returns(Constant([[0, 2]]))
    np.testing.assert_allclose(returns[:, 0, 0], [1.0, 1.75])


def test_rows_that_go_on_keep_their_own_observations_and_rewards() -> None:
    policies = Watchful([[7, 0, 0, 3, 0, 1, 2, 0], [0, 6], [0, 0, 0]])
    Evaluator(ENV_ID, [1, 2, 3], gamma=1.0, num_episodes=2).returns(policies)
    assert policies.widths[0] == 16
    assert policies.widths[-1] == 2
    # every step but those two of the last moment, which end the evaluation
    assert policies.seen == 2 * ((8 + 1 + 1 + 4 + 1 + 2 + 3 + 1) + (1 + 7) + (1 + 1 + 1)) - 2


def test_a_learner_is_measured_as_if_it_were_alone() -> None:
    lengths = [[5, 0, 1], [2], [0, 8, 8, 3, 1]]
    together = evaluate(lengths, [4, 5, 6], gamma=0.9, episodes=2)
    for returns, some, seed in zip(together, lengths, [4, 5, 6], strict=True):
        assert returns.shape == (len(some), 2, 2)
        np.testing.assert_array_equal(returns, evaluate([some], [seed], 0.9, 2)[0])
        expected = [sum(0.9**t for t in range(n + 1)) for n in some]
        np.testing.assert_allclose(returns[:, 0, 0], expected)


def test_episodes_that_are_over_cost_no_more_inference() -> None:
    policies = Constant([[0, 0, 0, 8]])
    Evaluator(ENV_ID, [1], gamma=1.0, num_episodes=1).returns(policies)
    assert policies.widths == [4] + [1] * 8


def test_a_front_holds_the_means_over_episodes_that_are_not_dominated() -> None:
    evaluator = Evaluator(ENV_ID, [1, 2], gamma=1.0, num_episodes=3)
    fronts = evaluator.fronts(Constant([[0, 4, 2], [1, 1]]))
    assert [front.shape for front in fronts] == [(1, 2), (1, 2)]
    assert fronts[0][0, 0] == 5.0
    starts = evaluate([[0]], [1], episodes=3)[0][0, :, 1]
    np.testing.assert_allclose(fronts[0][0, 1], 5 * starts.mean(), rtol=1e-6)
