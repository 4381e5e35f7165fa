"""Pareto Conditioned Networks: commands, episodes, and learners that share a batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import optuna
import pytest
import torch

from dask_mohpo import hypervolume
from dask_mohpo.agents._action_heads import BoxHead, DiscreteHead, make_head
from dask_mohpo.agents._envs import FlatEnvs
from dask_mohpo.agents._episodes import (
    Episodes,
    best_episodes,
    crowding_distance,
    returns_to_go,
    spread,
)
from dask_mohpo.agents.pcn import PCN, PCNConfig, search_space
from dask_mohpo.errors import EnvironmentSpecError, UsageError
from dask_mohpo.evaluation import Evaluator

ENV_ID = "deep-sea-treasure-v0"
CONTINUOUS = "mo-mountaincarcontinuous-v0"
SMALL: dict[str, Any] = {
    "hidden_dim": 16,
    "batch_size": 16,
    "num_er_episodes": 10,
    "num_step_episodes": 4,
    "num_model_updates": 3,
    "max_buffer_size": 20,
}


def agent(seeds: tuple[int, ...] = (1,), steps: int = 1000, **config: Any) -> PCN:
    values = PCNConfig.from_mapping({**SMALL, **config})
    return PCN(values, ENV_ID, seeds, total_timesteps=steps)


def front(trained: PCN, seeds: tuple[int, ...], num: int = 10) -> list[np.ndarray]:
    return Evaluator(ENV_ID, seeds, gamma=1.0, num_episodes=1).fronts(trained.policies(num))


def test_returns_to_go() -> None:
    rewards = np.array([[0.0, -1.0], [0.0, -1.0], [8.0, -1.0]])
    np.testing.assert_allclose(returns_to_go(rewards, 1.0), [[8, -3], [8, -2], [8, -1]])
    half = np.array([[2, -1.75], [4, -1.5], [8, -1]])
    np.testing.assert_allclose(returns_to_go(rewards, 0.5), half)


def test_crowding_distance() -> None:
    points = np.array([[0.0, 10.0], [1.0, 6.0], [4.0, 5.0], [10.0, 0.0]])
    # the middle ones: (4 - 0)/10 + (10 - 5)/10 and (10 - 1)/10 + (6 - 0)/10
    expected: np.ndarray = np.array([np.inf, 0.9, 1.5, np.inf])
    np.testing.assert_allclose(crowding_distance(points), expected)
    assert crowding_distance(np.ones((3, 2))).tolist() == [0, 0, 0]


def test_the_front_is_kept_before_all_else_and_repeats_last() -> None:
    returns = np.array([[1.0, -1], [5.0, -5], [1.0, -1], [0.5, -9], [9.0, -9], [4.9, -5.1]])
    kept = best_episodes(returns, 3)
    assert set(kept.tolist()) == {1, 2, 4}  # of the equal ones the latest
    assert best_episodes(returns, 6)[-1] == 0


def test_spread_takes_the_ends_and_then_the_farthest() -> None:
    points = np.array([[0.0, 4.0], [1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [4.0, 0.0]])
    assert spread(points, 3).tolist() == [0, 2, 4]
    assert spread(points, 9).tolist() == [0, 1, 2, 3, 4]
    assert len(spread(points, 1)) == 1


def test_episodes_know_what_was_still_to_come() -> None:
    data = Episodes(2, 2, (1,), (), np.int64)
    data.add(
        np.arange(3, dtype=np.float32)[:, None],
        np.array([0, 1, 2]),
        np.array([[5.0, -2], [5.0, -1], [1.0, -1]]),
        np.array([2, 1]),  # an episode of two steps, then one of a single step
    )
    assert data.returns.tolist() == [[5, -2], [1, -1]]
    assert data._commands.tolist() == [[5, -2, 2], [5, -1, 1], [1, -1, 1]]
    data.add(np.full((1, 1), 9, np.float32), np.array([3]), np.array([[0.0, -1]]), np.array([1]))
    assert data.returns.tolist() == [[5, -2], [1, -1]]  # the dominated one did not stay
    obs, _, actions = data.draw(4, 8, np.random.default_rng(0))
    assert obs.shape == (4, 8, 1)
    assert set(actions.ravel().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_command_shrinks_by_what_came_in_and_by_a_step(gamma: float) -> None:
    one = agent(gamma=gamma, scaling_factor=[0.1, 0.1, 0.01])
    one.train(200)
    policies = one.policies(3)
    [(returns, horizons)] = policies._commands
    actor: Any = policies.start(np.zeros((1, 1), np.int64))
    actor.observe(np.array([[[2.0, -1.0]]]))
    np.testing.assert_allclose(actor._returns[0, 0], (returns[0] - [2, -1]) / gamma)
    assert actor._horizons[0, 0] == max(horizons[0] - 1, 1)
    for _ in range(200):
        actor.observe(np.array([[[0.0, -1.0]]]))
    assert actor._horizons[0, 0] == 1
    assert np.isfinite(actor._returns).all()


def test_commands_go_beyond_what_is_known_but_not_beyond_the_most() -> None:
    one = agent(max_return=[30.0, -1.0])
    one.train(300)
    returns, horizons = one._commands(0)
    data = one._datasets[0]
    known = data.returns[data.front]
    assert returns.shape == (4, 2)
    assert (returns[:, 0] <= 30.0).all() and (returns[:, 1] <= -1.0).all()
    nearest = [known[np.abs(known - r).sum(axis=1).argmin()] for r in returns]
    assert all(((r >= k - 1e-9) | (r >= -1.0)).all() for r, k in zip(returns, nearest, strict=True))
    assert (horizons >= 1).all()


def test_the_same_seed_gives_the_same_front_bit_for_bit() -> None:
    fronts = []
    for _ in range(2):
        trained = agent((4,))
        trained.train(1000)
        fronts.append(front(trained, (4,))[0])
    assert np.array_equal(fronts[0], fronts[1])


def test_a_learner_does_not_depend_on_who_shares_the_batch() -> None:
    alone, together = agent((7,), steps=400), agent((3, 7, 9), steps=400)
    alone.train(400)
    together.train(400)
    mine, shared = alone.model.network.flat[0], together.model.network.flat[1]
    torch.testing.assert_close(shared, mine, rtol=1e-3, atol=1e-4)
    assert np.array_equal(together._datasets[1].returns, alone._datasets[0].returns)
    assert together.steps[1] == alone.steps[0]


def test_training_in_pieces_is_training_at_once() -> None:
    whole, pieces = agent(), agent()
    whole.train(900)
    for until in (1, 150, 151, 600, 900):
        pieces.train(until)
    assert list(pieces.steps) == list(whole.steps)
    assert torch.equal(pieces.model.network.flat, whole.model.network.flat)


@pytest.mark.parametrize("num", [1, 3, 50])
def test_policies_are_no_more_than_asked_for(num: int) -> None:
    one = agent((1, 2))
    one.train(1000)
    policies = one.policies(num)
    assert all(1 <= count <= num for count in policies.counts)
    for points in front(one, (1, 2), num):
        assert points.shape[1] == 2
        assert np.isfinite(points).all()


def test_policies_before_the_first_episode() -> None:
    assert list(agent((1, 2)).policies(5).counts) == [1, 1]


def test_continuous_actions_stay_within_bounds() -> None:
    values = PCNConfig.from_mapping({**SMALL, "num_er_episodes": 2, "noise": 3.0})
    one = PCN(values, CONTINUOUS, (1,), total_timesteps=2500)
    one.train(2500)
    actions = one._datasets[0]._actions
    assert actions.dtype == np.float32
    assert (np.abs(actions) <= 1).all()
    assert actions.std() > 0.1
    assert torch.isfinite(one.model.network.flat).all()
    [points] = Evaluator(CONTINUOUS, (1,), gamma=1.0, num_episodes=1).fronts(one.policies(3))
    assert points.shape[1] == one._num_objectives
    assert np.isfinite(points).all()


def test_a_box_head_maps_to_the_range_and_beyond_an_open_one() -> None:
    low, high = np.array([-2.0, 0.0, -np.inf]), np.array([4.0, 1.0, np.inf])
    head = BoxHead(gym.spaces.Box(low, high, dtype=np.float64))
    np.testing.assert_allclose(head.greedy(np.zeros(3)), [1, 0.5, 0])
    np.testing.assert_allclose(head.greedy(np.full(3, 50.0)), [4, 1, 50])
    outputs, actions = torch.zeros(1, 1, 3), torch.tensor([[[4.0, 0.5, 0.0]]])
    assert head.loss(outputs, actions).item() == pytest.approx(1 / 3)


def test_a_discrete_head_explores_as_often_as_told() -> None:
    head = DiscreteHead(gym.spaces.Discrete(4))
    outputs = np.tile([0.0, 50.0, 0.0, 0.0], (100_000, 1))
    draws = head.draws(np.random.default_rng(0), (100_000,))
    share = np.full(100_000, 0.4)
    actions = head.explore(outputs, draws, noise=0.0, random_share=share)
    np.testing.assert_allclose(np.bincount(actions) / 1e5, [0.1, 0.7, 0.1, 0.1], atol=0.005)
    logits = torch.tensor([[[0.0, np.log(3.0), 0.0, 0.0]]], dtype=torch.float64)
    assert head.loss(logits, torch.tensor([[1]])).item() == pytest.approx(np.log(2.0))


def test_actions_of_another_kind_are_refused() -> None:
    envs = FlatEnvs(ENV_ID, 1)
    envs.action_space = gym.spaces.MultiDiscrete([2, 3])
    with pytest.raises(EnvironmentSpecError, match=r"discrete actions .* not MultiDiscrete"):
        make_head(envs)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scaling_factor": [0.1, 0.1]}, "has 2 numbers; it takes 3, for 2 objectives and the"),
        ({"max_return": [1.0, 2.0, 3.0]}, "has 3 numbers; it takes 2, for 2 objectives"),
    ],
)
def test_vectors_of_the_wrong_width(values: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        agent(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scaling_factor": [0.1, 0]}, "scaling_factor = .* > 0"),
        ({"learning_rate": -1}, "learning_rate = -1.0 .* > 0"),
        ({"gamma": 0}, r"gamma = 0.0 .* \(0, 1\]"),
        ({"hidden_dim": 0}, "hidden_dim = 0 .* ≥ 1"),
        ({"num_model_updates": 1.5}, "num_model_updates = 1.5 .* int"),
        ({"noise": -0.1}, "noise = -0.1 .* ≥ 0"),
        ({"max_buffer": 3}, "Did you mean 'max_buffer_size'"),
    ],
)
def test_mistakes_in_a_configuration(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PCNConfig.from_mapping(values)


def test_all_names_of_the_ancestor_are_taken() -> None:
    config = PCNConfig.from_mapping(
        {
            "scaling_factor": [0.1, 0.1, 0.01], "learning_rate": 1e-2, "gamma": 1.0,
            "batch_size": 256, "hidden_dim": 64, "noise": 0.1, "num_er_episodes": 50,
            "num_step_episodes": 10, "num_model_updates": 10, "max_return": [124.0, -1.0],
            "max_buffer_size": 200,
        }
    )  # fmt: skip
    assert config.scaling_factor == (0.1, 0.1, 0.01)
    assert config.max_return == (124.0, -1.0)


def test_the_built_in_space_gives_valid_configurations() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(10):
        PCNConfig.from_mapping(search_space(study.ask()))


def test_without_scaling_factors_commands_become_numbers_near_ten() -> None:
    one = agent()
    one.train(500)
    scale = one.model.scale[0, 0].numpy()
    assert np.isfinite(scale).all() and (scale > 0).all() and not np.allclose(scale, 1.0)


def test_minecart_runs() -> None:
    values = PCNConfig.from_mapping(SMALL)
    one = PCN(values, "minecart-deterministic-v0", (1, 2), total_timesteps=3000)
    one.train(3000)
    assert min(one.steps) >= 3000
    assert torch.isfinite(one.model.network.flat).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_pays() -> None:
    config = {
        "learning_rate": 1e-2, "batch_size": 256, "hidden_dim": 64, "num_er_episodes": 50,
        "num_step_episodes": 10, "num_model_updates": 10, "max_buffer_size": 200,
        "scaling_factor": [0.1, 0.1, 0.01],
    }  # fmt: skip
    seeds = (1, 2)
    one = agent(seeds, steps=15_000, **config)
    one.train(1)
    beginning = np.mean([hypervolume(f, (0, -50)) for f in front(one, seeds)])
    one.train(15_000)
    end = np.mean([hypervolume(f, (0, -50)) for f in front(one, seeds, 50)])
    assert end > 800 > beginning
